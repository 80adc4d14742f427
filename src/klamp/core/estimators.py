"""Estimators of the KL divergence: its value. What their gradient does is another choice, see `gradients`.

All take log-probabilities of the sampled tokens under the policy and the reference, with
log_ratio = delta = log policy - log ref, and u = ref / policy = exp(-delta). "Unbiased" is meant for tokens that were
sampled from the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.arguments import FLOATS, check_roles, check_tensors
from klamp.core.masking import log_ratio, upcast
from klamp.core.types import Direction, Estimator, refuse_positive
from klamp.errors import ConfigError, DataError, ShapeError, check_name

TokenFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class EstimatorRow:
    """An estimator and its properties, each proven by enumeration in the tests."""

    name: str
    formula: str
    """The value, in terms of delta = log policy - log ref."""
    value: TokenFunction
    """delta -> value."""
    derivative: TokenFunction
    """delta -> d value / d delta: the coefficient of grad log policy when the value itself is the loss."""
    slope: str
    """The derivative, in terms of delta."""
    bias: str
    """Bias of the value under samples of the policy."""
    non_negative: bool
    """Whether every single value is >= 0."""
    gradient_as_loss: str
    """What the expected gradient is when the value itself is differentiated as a loss, on-policy."""
    caution: str = ""
    """What the value as a loss does, where that is not the gradient of KL(policy || ref)."""
    remark: str
    """When to use it."""
    paper: str = "http://joschu.net/blog/kl-approx.html"
    """Where it is stated."""


def check_estimator(name: str, *, function: str) -> None:
    """Refuse a name that is not an estimator of sampled tokens."""
    if str(name) == "exact":
        raise ConfigError(
            f"{function} cannot form the exact KL from log-probabilities of sampled tokens",
            got="'exact'",
            why="the exact KL is summed over the whole vocabulary, so it needs the logits of both models",
            fix="call exact_kl(policy_logits, ref_logits), or use KLConfig(kl_estimator='exact') with grpo_loss",
        )
    check_name("KL estimator", name, ESTIMATORS)


def _k3(delta: Tensor) -> Tensor:
    return torch.expm1(-delta) + delta


ESTIMATORS: dict[str, EstimatorRow] = {
    row.name: row
    for row in (
        EstimatorRow(
            name="k1",
            formula="delta",
            value=lambda delta: delta,
            derivative=torch.ones_like,
            slope="1",
            bias="unbiased",
            non_negative=False,
            gradient_as_loss="zero",
            caution="has an expected gradient of exactly zero on the policy's own tokens, summed over them or over a "
            "fixed length: it regularises nothing (a mean over each completion's own length leaves a pull on the "
            "length, and nothing else{kept}). Use kl_gradient='reverse'.",
            remark="the value for rewards and advantages; as a loss it regularises nothing",
        ),
        EstimatorRow(
            name="k2",
            formula="delta^2 / 2",
            value=lambda delta: delta.square() / 2,
            derivative=lambda delta: delta,
            slope="delta",
            bias="biased, third order",
            non_negative=True,
            gradient_as_loss="reverse",
            remark="right gradient, value only near the reference",
        ),
        EstimatorRow(
            name="k3",
            formula="exp(-delta) - 1 + delta",
            value=_k3,
            derivative=lambda delta: -torch.expm1(-delta),
            slope="1 - exp(-delta)",
            bias="unbiased where the reference's support lies within the sampler's",
            non_negative=True,
            gradient_as_loss="forward",
            caution="follows the gradient of KL(ref||policy) at each position, not of KL(policy||ref), which "
            "its value estimates. Use kl_gradient='reverse', or name it: 'forward'.",
            remark="low noise near the reference; far away noisier than k1 (Gaussian log-ratios: past 0.63 nats)",
        ),
        EstimatorRow(
            name="abs",
            formula="|delta|",
            value=torch.abs,
            derivative=torch.sign,
            slope="sign(delta)",
            bias="over-estimates",
            non_negative=True,
            gradient_as_loss="L1 distance",
            caution="pulls down the L1 distance, not a KL. Use kl_gradient='reverse'.",
            remark="robust distance for monitoring; not a KL",
        ),
    )
}


def kl_estimate(
    policy_logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], *, estimator: Estimator = "k3"
) -> Float[Tensor, "*shape"]:
    """Per-token estimate of KL(policy || ref) in nats.

    Equation (delta = log policy - log ref)::

        k1 = delta      k2 = delta^2 / 2      k3 = exp(-delta) - 1 + delta      abs = |delta|

    Sampler: the tokens must be drawn from the policy.
    Value: k1 unbiased, any sign; k2 biased in third order; k3 unbiased (if the reference's support lies within the
    sampler's), >= 0; abs over-estimates.
    Gradient: the formula's. As a loss, k1 has expected gradient 0, k2 follows KL(policy || ref), k3 follows
    KL(ref || policy). Use `kl_penalty` to choose the gradient.
    Shapes: any, equal -> that shape. float16 and bfloat16 are computed in float32; nothing is clamped.

    Raises:
        TensorError: no tensors, no floating-point numbers, or two devices.
        ShapeError: the two tensors differ in shape.
        DataError: log-probabilities above 0.
        UnknownNameError: an unknown estimator.
        ConfigError: `exact`, which needs logits; see `exact_kl`.

    Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
    """
    check_estimator(estimator, function="kl_estimate")
    check_tensors(FLOATS, policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    delta = log_ratio(policy_logprobs, ref_logprobs)
    refuse_positive(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    return ESTIMATORS[estimator].value(delta)


def divergence_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) - p + q of each entry, never negative: the terms of KL(p || q) where both sum to 1.

    It is q where p is 0 or rounds to 0, infinite where q alone is 0, and takes any two positive numbers.
    """
    p, q = log_p.exp(), log_q.exp()
    delta = torch.where(p == 0, torch.zeros_like(log_p), log_p - log_q)
    near = delta.abs() < 1
    close = p * _k3(torch.where(near, delta, torch.zeros_like(delta)))
    return torch.where(p == 0, q, torch.where(near, close, q + p * (delta - 1)))


def _expectation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The sum over v of p_v (log p_v - log q_v); where p_v is 0, value and gradient are exactly 0.

    The value equals `divergence_terms`'s, without cancellation. The gradient is the plain sum's.
    """
    empty = log_p.detach().exp() == 0  # also where it only rounds to 0, and times an infinite ratio would be NaN
    log_p_safe = torch.where(empty, torch.zeros_like(log_p), log_p)
    log_q_safe = torch.where(empty, torch.zeros_like(log_q), log_q)
    p, delta = log_p_safe.exp(), log_p_safe - log_q_safe
    plain = torch.where(empty, torch.zeros_like(log_p), p * delta).sum(-1)
    with torch.no_grad():
        value = divergence_terms(log_p, log_q).sum(-1)
    # Infinite where the second model forbids what the first one allows; inf - inf would hide it.
    return torch.where(plain.isfinite(), value + (plain - plain.detach()), plain)


def _js(log_policy: Tensor, log_ref: Tensor) -> Tensor:
    both_empty = torch.isneginf(log_policy) & torch.isneginf(log_ref)
    a, b = (torch.where(both_empty, torch.zeros_like(x), x) for x in (log_policy, log_ref))
    # logaddexp has no gradient where both are -inf; there the mean is empty too.
    log_mean = torch.where(both_empty, log_policy.detach(), torch.logaddexp(a, b) - math.log(2))
    return (_expectation(log_policy, log_mean) + _expectation(log_ref, log_mean)) / 2


DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": _expectation,
    "forward": lambda log_policy, log_ref: _expectation(log_ref, log_policy),
    "js": _js,
}


def _check_logits(**logits: Tensor) -> None:
    """Refuse probabilities and negative log-likelihoods: 64 rows at most, all positive, that make up 1."""
    for name, scores in logits.items():
        rows = scores.detach().flatten(0, -2)[:64] if scores.ndim > 1 else scores.detach()[None]
        few = rows.numel() == 0 or rows.shape[-1] < 8  # logits of so few words may look like them
        if few or scores.is_meta or torch.compiler.is_compiling():
            continue
        close = max(1e-4, 2 * torch.finfo(scores.dtype).eps)
        for kind, x in (("probabilities", rows), ("negative log-likelihoods", (-rows).exp())):
            if bool(((rows > 0) & ((x.sum(-1, keepdim=True) - 1).abs() < close)).all()):
                raise DataError(
                    f"{name} holds {kind}",
                    got=f"positive rows that make up 1, the first entry {float(rows[0, 0]):.4f}",
                    why="their softmax is another distribution, nearly the uniform one",
                    fix="pass logits, or log-probabilities of the whole vocabulary",
                )


def exact_kl(
    policy_logits: Float[Tensor, "*shape vocab"],
    ref_logits: Float[Tensor, "*shape vocab"],
    *,
    direction: Direction = "reverse",
) -> Float[Tensor, "*shape"]:
    """The KL divergence over the whole vocabulary at each position, in nats.

    Equation (p = softmax(policy_logits), q = softmax(ref_logits), m = (p + q) / 2)::

        reverse = sum_v p_v (log p_v - log q_v) = KL(policy || ref)
        forward = sum_v q_v (log q_v - log p_v) = KL(ref || policy)
        js      = (KL(p || m) + KL(q || m)) / 2

    Sampler: none for the prefix itself; averaged over prefixes it is the Rao-Blackwellised estimate for their sampler.
    Value: exact for the prefix, >= 0 up to rounding. A vocabulary entry with logit -inf has probability 0, and so has
    one whose probability rounds to 0. NaN where a row holds NaN or nothing but -inf, as padding does.
    Gradient: exact for the prefix, in the policy alone, 0 where the value is NaN; it leaves out what a token does to
    later prefixes (see `kl_penalty`, horizon).
    Shapes: [..., V], [..., V] -> [...].

    Raises:
        TensorError: no tensors, no floating-point numbers, or two devices.
        ShapeError: the logits differ in shape, or have no vocabulary.
        UnknownNameError: an unknown direction.
        DataError: probabilities or negative log-likelihoods.
        ConfigError: policy and reference swapped (the reference has the gradient).

    Source: arXiv:2504.10637 (Rao-Blackwellised estimation of the KL divergence between language models)
    """
    check_name("KL direction", direction, DIRECTIONS)
    check_tensors(FLOATS, policy_logits=policy_logits, ref_logits=ref_logits)
    check_roles(policy_logits, ref_logits)
    if policy_logits.ndim == 0 or policy_logits.shape != ref_logits.shape:
        raise ShapeError(
            "policy and reference logits differ in shape, or have no vocabulary",
            got=f"policy {tuple(policy_logits.shape)}, ref {tuple(ref_logits.shape)}",
            why="the sum runs over one common vocabulary",
            fix="use the same tokens; where one vocabulary is padded further, cut both to the ids that they share, "
            "logits[..., :n], and count what is sampled beyond them as not scored",
        )
    _check_logits(policy_logits=policy_logits, ref_logits=ref_logits)
    policy, ref = upcast(policy_logits), upcast(ref_logits.detach())
    valid = (policy.detach().amax(-1) + ref.amax(-1)).isfinite()  # chosen before the arithmetic: NaN * 0 is NaN
    log_policy, log_ref = (torch.where(valid[..., None], x, torch.zeros_like(x)).log_softmax(-1) for x in (policy, ref))
    return torch.where(valid, DIRECTIONS[direction](log_policy, log_ref), math.nan)
