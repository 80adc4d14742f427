"""An enumeration for the audits: one position, five tokens. It shares no code with klamp's oracle."""

from collections.abc import Callable

import torch
from torch import Tensor

VOCAB = 5
TokenLoss = Callable[[Tensor, Tensor, int], Tensor]
"""(log-probabilities of the policy [V], of the reference [V], the sampled token) -> its KL, a scalar."""


def make_world(seed: int = 3, *, spread: float = 0.8) -> tuple[Tensor, Tensor]:
    """(policy's logits, a leaf; reference's logits), float64."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (spread * torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), ref


def divergences(policy: Tensor, ref: Tensor) -> dict[str, Tensor]:
    """KL(policy||ref) as `reverse` and KL(ref||policy) as `forward`."""
    p, q = policy.log_softmax(-1), ref.log_softmax(-1)
    return {"reverse": (p.exp() * (p - q)).sum(), "forward": (q.exp() * (q - p)).sum()}


def expected_loss(loss: TokenLoss, policy: Tensor, ref: Tensor, sampler: Tensor | None = None) -> tuple[float, Tensor]:
    """(expected value, expected gradient with respect to the policy's logits); the policy samples unless told."""
    probs = (policy if sampler is None else sampler).detach().softmax(-1)
    p, q = policy.log_softmax(-1), ref.log_softmax(-1)
    total = torch.stack([probs[token] * loss(p, q, token) for token in range(VOCAB)]).sum()
    (gradient,) = torch.autograd.grad(total, policy)
    return total.item(), gradient


def gradient_of(name: str, policy: Tensor, ref: Tensor) -> Tensor:
    """The gradient of a divergence with respect to the policy's logits."""
    (gradient,) = torch.autograd.grad(divergences(policy, ref)[name], policy)
    return gradient


def assert_follows(gradient: Tensor, name: str, policy: Tensor, ref: Tensor, *, tolerance: float = 1e-9) -> None:
    """The gradient is that of this divergence (or "zero"), and not that of the others."""
    unit = gradient_of("reverse", policy, ref).norm()
    for each in ("reverse", "forward", "zero"):
        known = torch.zeros_like(gradient) if each == "zero" else gradient_of(each, policy, ref)
        distance = (gradient - known).norm() / unit
        assert (distance < tolerance) == (each == name), f"{each}: {distance:.3g}"
