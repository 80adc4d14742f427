"""Checks of the gradients at one position: which divergence each choice of `kl_penalty` follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from klamp.core.gradients import kl_penalty
from klamp.core.types import Estimator, Gradient
from klamp.verify.gradient_names import NOTHING_KNOWN
from klamp.verify.oracle import Loss, Truths, expected_gradient, truths
from klamp.verify.proofs.check import Check, follows, is_true
from klamp.verify.worlds import Chain, Outcomes, Sampler, one_position, random_chain

VALUES: tuple[Estimator, ...] = get_args(Estimator)
OWN: Mapping[Estimator, str] = {"k1": "zero", "k2": "reverse", "k3": "forward", "abs": "L1 distance"}
"""What each estimator's own gradient is, tokens sampled from the policy."""

SAMPLED: dict[Sampler, str] = {"policy": "tokens of the policy", "other": "tokens of another sampler, weighted"}
"""Who sampled, and how the claims say it."""


def prove_gradients() -> list[Check]:
    """Checks the gradients of `kl_penalty` at one position, for tokens of the policy and of another sampler."""
    checks = [_check(f"{name} as a loss (its own gradient)", [penalty(name, "own")], OWN[name]) for name in VALUES]
    named: tuple[tuple[Gradient, str], ...] = (("reverse", "reverse"), ("forward", "forward"), ("none", "zero"))
    for sampler, where in SAMPLED.items():
        for gradient, followed in named:
            losses = [penalty(name, gradient, sampler=sampler) for name in VALUES]
            checks.append(_check(f"gradient {gradient}, whichever the value; {where}", losses, followed, sampler))
    return checks


def prove_formulas() -> list[Check]:
    """Checks the gradients of plain formulas that are differentiated as they are written, without klamp."""
    rows: tuple[tuple[str, Loss, str, Sampler], ...] = (
        ("k1 as a loss, tokens of the policy", _k1, "zero", "policy"),
        ("k1 as a loss, tokens of another sampler", _k1, NOTHING_KNOWN, "other"),
        ("w k1 differentiated", lambda y: _w(y) * _k1(y), "reverse", "other"),
        ("sg(w) k2", lambda y: _w(y).detach() * _k2(y), "reverse", "other"),
        ("w k2 differentiated: that of E[k2]", lambda y: _w(y) * _k2(y), "E[k2]", "other"),
        ("w k3 differentiated (DeepSeek-V3.2, RPG)", lambda y: _w(y) * _k3(y), "reverse", "other"),
        ("sg(w) k3", lambda y: _w(y).detach() * _k3(y), "forward", "other"),
        ("k1 in the reward", lambda y: _k1(y).detach() * y.policy_logprobs, "reverse", "policy"),
        ("k3 in the reward", lambda y: _k3(y).detach() * y.policy_logprobs, "reverse - forward", "policy"),
        ("k2 in the reward", lambda y: _k2(y).detach() * y.policy_logprobs, NOTHING_KNOWN, "policy"),
    )
    checks = [_check(claim, [loss], followed, sampler) for claim, loss, followed, sampler in rows]
    size = _size_near_the_reference()
    text = f"{100 * size:.2g} % of the gradient of KL(policy||ref)"
    return [*checks, is_true("k3 in the reward, near the reference: cancels", size < 0.05, text, expected="below 5 %")]


def penalty(value: Estimator, gradient: Gradient, *, sampler: Sampler = "policy") -> Loss:
    """klamp's penalty as a loss of enumerated completions."""

    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        return kl_penalty(
            y.policy_logprobs, y.ref_logprobs, y.mask, value=value, gradient=gradient, behavior_logprobs=behavior
        )

    return loss


def _check(claim: str, losses: Sequence[Loss], name: str, sampler: Sampler = "policy") -> Check:
    chains = [random_chain(seed, vocab=4, length=1, eos=None, sampler=sampler) for seed in range(2)]
    gradients = [expected_gradient(chain, loss) for loss in losses for chain in chains]
    return follows(claim, gradients, [_known(chain) for _ in losses for chain in chains], name)


def _known(chain: Chain) -> Truths:
    """The known gradients at one position, with those of E[k2], of the L1 distance and of reverse minus forward."""
    exact = truths(chain)
    log_p, log_q = chain.logprobs("policy")[0], chain.logprobs("ref")[0]
    mean_k2 = (log_p.exp() * (log_p - log_q) ** 2 / 2).sum()
    l1 = (log_p.exp() - log_q.exp()).abs().sum()
    (k2_gradient,) = torch.autograd.grad(mean_k2, chain.policy_logits, retain_graph=True)
    (l1_gradient,) = torch.autograd.grad(l1, chain.policy_logits)
    both = exact["reverse"] - exact["forward"]
    return exact | {"E[k2]": k2_gradient, "L1 distance": l1_gradient, "reverse - forward": both}


def _size_near_the_reference() -> float:
    policy, direction = (random_chain(seed, vocab=4, length=1, eos=None).policy_logits.detach()[0] for seed in (0, 1))
    chain = one_position(policy, policy + 0.02 * direction)
    gradient = expected_gradient(chain, lambda y: _k3(y).detach() * y.policy_logprobs)
    return (gradient.norm() / truths(chain)["reverse"].norm()).item()


def _w(y: Outcomes) -> Tensor:
    return (y.policy_logprobs - y.sampler_logprobs).exp()


def _k1(y: Outcomes) -> Tensor:
    return y.policy_logprobs - y.ref_logprobs


def _k2(y: Outcomes) -> Tensor:
    return _k1(y) ** 2 / 2


def _k3(y: Outcomes) -> Tensor:
    return (-_k1(y)).exp() - 1 + _k1(y)
