"""The proofs on a real model: exact means over its whole vocabulary, at prefixes that it sampled.

At one prefix a language model is a choice among V tokens, whatever V is: the expected value and the expected gradient
of an estimator are sums over the vocabulary, and need no sampling. The prefixes come from completions that the policy
sampled; the tokens that it sampled there give the noisy numbers that a trainer sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.core.estimators import exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.types import Estimator, Gradient
from klamp.errors import ShapeError
from klamp.verify.answers import Answer, Sampled, TextTable
from klamp.verify.gradient_names import NOTHING_KNOWN, Followed, cosine, name_gradient
from klamp.verify.proofs.check import Check, is_equal, is_true

Rows = Float[Tensor, "prefixes vocab"]
TokenLoss = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-8
"""Relative error up to which numbers are equal; sums over a large vocabulary round."""


def verify_logits(
    policy_logits: Rows, ref_logits: Rows, tokens: Int[Tensor, " prefixes"], *, names: tuple[str, str]
) -> Answer:
    """Measures the estimators and their gradients on the distributions of a real model.

    Args:
        policy_logits: the policy's row at each sampled prefix; any floating-point type, computed in float64.
        ref_logits: the reference's row at the same prefixes.
        tokens: the token that the policy sampled there.
        names: what to call the policy and the reference.

    Raises:
        ShapeError: rows that do not belong together.
    """
    if policy_logits.shape != ref_logits.shape or tokens.shape != policy_logits.shape[:1]:
        raise ShapeError(
            "policy, reference and tokens do not belong together",
            got=f"{tuple(policy_logits.shape)}, {tuple(ref_logits.shape)}, {tuple(tokens.shape)}",
            why="each prefix has a row of both models over one vocabulary, and a sampled token",
            fix="use two models with the same tokenizer",
        )
    policy, ref = policy_logits.detach().double(), ref_logits.detach().double()
    reverse = exact_kl(policy, ref).mean().item()
    forward = exact_kl(policy, ref, direction="forward").mean().item()
    values, value_checks = _values(policy, ref, tokens, reverse)
    gradients, gradient_checks = _gradients(policy, ref)
    prefixes, vocab = policy.shape
    title = (
        f"{prefixes} sampled prefixes, {vocab:,} tokens; KL(policy||ref) = {reverse:.4g}, "
        f"KL(ref||policy) = {forward:.4g} nats per token"
    )
    return Answer(
        question=f"What do the estimators do on {names[0]} against {names[1]}?",
        tables=(
            TextTable(title=title, columns=("value", "exact", "against KL(policy||ref)", "sampled"), rows=values),
            gradients,
        ),
        checks=(
            is_true("the two models differ", reverse > 1e-12, f"{reverse:.3g} nats", expected="more than 0"),
            *value_checks,
            *gradient_checks,
        ),
        words=(
            "exact: summed over the whole vocabulary at each prefix; sampled: what the drawn tokens alone say, with "
            "the standard error that so few of them have. A value may be unbiased and its gradient that of another "
            "divergence.",
        ),
    )


def _values(
    policy: Rows, ref: Rows, tokens: Tensor, target: float
) -> tuple[tuple[tuple[str, ...], ...], tuple[Check, ...]]:
    log_policy, log_ref = policy.log_softmax(-1), ref.log_softmax(-1)
    probs = log_policy.exp()
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for name in get_args(Estimator):
        each = kl_estimate(log_policy, log_ref, estimator=name)
        each = torch.where(probs > 0, each, 0.0)
        mean = (probs * each).sum(-1)
        noise = (probs * (each - mean[:, None]).square()).sum(-1)
        drawn = Sampled(
            mean=each.gather(-1, tokens[:, None]).mean().item(), error=math.sqrt(noise.sum().item()) / len(tokens)
        )
        exact = mean.mean().item()
        relative = exact / target - 1 if target else 0.0
        off = "unbiased" if abs(relative) < TOLERANCE else f"{100 * relative:+.2g} %"
        rows.append((name, f"{exact:.5g}", off, drawn.text))
        if name in ("k1", "k3"):
            checks.append(is_equal(f"{name} is unbiased (relative)", relative, 0.0, tolerance=TOLERANCE))
    return tuple(rows), tuple(checks)


def _gradients(policy: Rows, ref: Rows) -> tuple[TextTable, tuple[Check, ...]]:
    known = _known(policy, ref)
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for (value, gradient), truth in EXPECTED.items():
        found, angles = _follow(policy, ref, _penalty(value, gradient), known)
        claim = f"{value}, gradient {gradient}"
        rows.append((claim, found.in_words, f"{angles[0]:.4f}", f"{angles[1]:.4f}"))
        checks.append(is_true(f"{claim} as a loss", found.is_exactly(truth), found.in_words, expected=truth))
    columns = ("as a loss", "is the gradient of", "cosine KL(policy||ref)", "cosine KL(ref||policy)")
    title = "expected gradient with respect to the logits, all prefixes together"
    return TextTable(title=title, columns=columns, rows=tuple(rows)), tuple(checks)


EXPECTED: Mapping[tuple[Estimator, Gradient], str] = {
    ("k1", "own"): "zero",
    ("k2", "own"): "reverse",
    ("k3", "own"): "forward",
    ("k3", "reverse"): "reverse",
    ("abs", "own"): NOTHING_KNOWN,
}
"""(value, gradient) -> the name of the known gradient that it should follow at every position."""


def _penalty(value: Estimator, gradient: Gradient) -> TokenLoss:
    def loss(log_policy: Tensor, log_ref: Tensor) -> Tensor:
        mask = log_policy > -torch.inf
        return kl_penalty(log_policy, log_ref, mask, value=value, gradient=gradient)

    return loss


def _known(policy: Rows, ref: Rows) -> dict[str, Tensor]:
    """The known gradients with respect to the logits, from their formulas: those of both KLs, and zero."""
    log_p, log_q = policy.log_softmax(-1), ref.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    delta = torch.where(p > 0, log_p - log_q, 0.0)
    reverse = p * (delta - (p * delta).sum(-1, keepdim=True))
    return {"zero": torch.zeros_like(p), "reverse": reverse, "forward": p - q}


def _follow(policy: Rows, ref: Rows, loss: TokenLoss, known: dict[str, Tensor]) -> tuple[Followed, tuple[float, float]]:
    """Names the expected gradient sum_v sg(policy_v) grad loss_v over every token v of the vocabulary."""
    logits = policy.clone().requires_grad_(True)
    log_policy = logits.log_softmax(-1)
    per_token = loss(log_policy, ref.log_softmax(-1))
    (gradient,) = torch.autograd.grad((log_policy.detach().exp() * per_token).sum(), logits)
    found = name_gradient([gradient], [known], tolerance=1e-7)
    if found.name == "zero":
        return found, (0.0, 0.0)
    return found, (cosine([gradient], [known["reverse"]]), cosine([gradient], [known["forward"]]))
