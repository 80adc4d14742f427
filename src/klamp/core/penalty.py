"""What a KL term does to a batch, without beta: the penalty of the loss, the shift of reward or advantage, the metrics.

A trainer that has a loss of its own adds `token_penalty` to it, or shifts its advantages by `shifted_advantages`, like
`grpo_loss`. In reward and advantage only k1 gives the gradient of KL(policy || ref), as a factor of the score function;
k3 gives the reverse minus the forward gradient, which cancels to first order near the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import exact_penalty, log_weights, penalty_from_weights, saturation, with_gradient
from klamp.core.masking import Totals, future_sum, masked, masked_mean, masked_sum, reduce_tokens, share_of, upcast
from klamp.core.surrogates import per_token
from klamp.core.term import Prepared, scored_by
from klamp.core.types import FORBIDDEN, HELD, Advantages, Estimator, Reduction, TokenValues
from klamp.errors import ConfigError, NonFiniteError


def _log_weights(prepared: Prepared) -> Tensor:
    """The off-policy log-weights; the prefix ratio runs over all trained tokens, excluded ones too."""
    term, batch = prepared.term, prepared.batch
    if term.off_policy == "none" or (term.of_prefixes and term.off_policy == "token"):
        return torch.zeros_like(prepared.log_ratio)
    sampler = scored_by(batch, "sampler", user="kl_off_policy", otherwise="set kl_off_policy='none'").logprobs
    horizon = term.weight_horizon
    return log_weights(batch.policy_logprobs, sampler, batch.mask, horizon=horizon, max_weight=term.max_weight)


def token_penalty(prepared: Prepared) -> TokenValues:
    """The penalty of each token of a batch in nats, without beta: what a loss adds. [B, T]

    Equation: c_i * gate_i(penalty_it), penalty as in `kl_penalty` (or `exact_penalty`), c_i the sequence's weight. A KL
    that is read at each prefix and holds a sampled tail (`topk_kl`) was given the token's own weight there.
    Value and gradient: the term's, clipped if it has a clip; masked and excluded tokens are exactly 0.

    Raises:
        ConfigError: the KL at each prefix or the sampler's log-probabilities are asked for and missing.
        NonFiniteError: the KL at some prefix is not finite.
    """
    term, batch, scored, log_w = prepared.term, prepared.batch, prepared.scored, _log_weights(prepared)
    choices: dict[str, Any] = {"gradient": term.gradient, "horizon": term.horizon, "kl_mask": prepared.excluded}
    if term.of_prefixes:
        kl = _kl_at_prefixes(prepared)
        penalty = exact_penalty(batch.policy_logprobs, kl, log_w, batch.mask, scored.forward_kl, **choices)
    else:
        penalty = penalty_from_weights(
            batch.policy_logprobs, prepared.bounded, log_w, batch.mask, value=cast(Estimator, term.value), **choices
        )
        if term.baseline != "none" and term.gradient == "reverse":
            weighted = -log_w.exp() * _baseline(prepared)
            penalty = penalty + with_gradient(torch.zeros_like(weighted), weighted, batch.policy_logprobs)
    penalty = penalty if prepared.gate is None else prepared.gate.apply(penalty, prepared.carried)
    return penalty if scored.weight is None else penalty * scored.weight.unsqueeze(-1)


def _baseline(prepared: Prepared) -> TokenValues:
    """What is taken from the log-ratio of each token: the KL at its prefix, a number; 0 without a baseline. [B, T]"""
    if prepared.term.baseline == "none":
        return torch.zeros_like(prepared.bounded)
    return masked(_kl_at_prefixes(prepared).detach().to(prepared.bounded.dtype), prepared.carried)


def _kl_at_prefixes(prepared: Prepared) -> TokenValues:
    """The KL at each prefix that a term needs; refuses a batch without it, or with one that is not finite. [B, T]"""
    anchor, kl = prepared.term.anchor, prepared.scored.kl
    if kl is None:
        raise ConfigError(
            f"{prepared.term.value!r} (baseline {prepared.term.baseline!r}) needs the KL of the batch at each prefix",
            got=f"anchors[{anchor!r}].kl=None",
            why="it is summed over the vocabulary (or a head), from both models' distributions",
            fix="set Scored.kl = exact_kl(policy_logits, ref_logits)",
        )
    lost = prepared.carried & ~kl.detach().isfinite()
    if bool(lost.any()):
        raise NonFiniteError(
            f"the KL to the {anchor} is infinite or NaN",
            got=f"{int(lost.sum())} of {kl.numel()} tokens",
            why="one of the two forbids a word that the other allows, or a row of logits is no distribution",
            fix="use a divergence that is finite for any two (teacher_direction='js'), or an estimator of the sampled "
            "tokens with a bound (teacher_estimator='k1', teacher_max_log_ratio); tokens that the anchor did not "
            "score are False in its mask",
        )
    return kl


def mean_penalty(
    prepared: Prepared, reduction: Reduction, *, length: int | None, totals: Totals | None
) -> Float[Tensor, ""]:
    """The penalty of a batch as one number, without beta; the term's own `normalizer` comes before `reduction`."""
    term, mask = prepared.term, prepared.batch.mask
    size: dict[str, Any] = {"length": length, "totals": totals}
    carried = None if term.mean_over == "trained" else prepared.carried
    return reduce_tokens(token_penalty(prepared), mask, term.normalizer or reduction, carried=carried, **size)


def advantages_with_kl(
    rewards: Float[Tensor, " batch"], prepared: Prepared, *, beta: float, advantages: Callable[[Tensor], Tensor]
) -> Float[Tensor, " batch"]:
    """The advantages of rewards from which the KL of each completion was taken, clipped if the term has a clip. [B]

    Equation: A(r - beta k), A = `advantages`, k_i the sequence's weight times the sum of k1 over the completion in nats
    (a mean could be lowered by writing more). With a clip A(r) - beta g_i A(k)_i, g the gate's factor: the baseline of
    r - beta g k would hold the others' gates, which depend on this completion's tokens.
    Gradient: through the score function KL(policy || ref)'s over sequences, times E[g_i], if advantages are not
    divided by the group's standard deviation (in a saturated group beta drops out) and tokens are left out by their
    position only.

    Source: arXiv:1909.08593; kl-placement and its failure with std-normalised advantages: docs/which-kl.md
    """
    kl = masked_sum(prepared.bounded, prepared.carried, -1)
    kl = kl if prepared.scored.weight is None else kl * prepared.scored.weight
    if prepared.gate is None:
        return advantages(upcast(rewards) - beta * kl)
    return advantages(rewards) - beta * prepared.gate.factor * advantages(kl)


def shifted_advantages(advantages: Advantages, prepared: Prepared, *, beta: float) -> TokenValues:
    """Advantages minus beta times the KL, after they were normalised: beta means the same in every group. [B, T]

    Equation: horizon `token` A_t - beta c (delta_t - b_t), b the baseline; `sequence` with sum_{j >= t} delta_j in the
    place of delta_t (reward-to-go); c the clip's factor times the sequence's weight. If tokens may be left out, the
    later terms are k3. The KL is the present policy's: under the surrogate's ratios the old policy's would follow
    KL(policy || anchor) less KL(policy || old).
    Gradient: through the score function `sequence` gives the gradient of KL(policy || ref) over sequences, `token` that
    of the KL at each sampled prefix; if tokens are left out, of the generalised KL (see `klamp.core.gradients`).

    Source: FRPO arXiv:2601.10201 (reward-to-go)
    """
    delta = prepared.bounded
    shift = delta - _baseline(prepared)
    if prepared.term.horizon == "sequence":
        later = delta if prepared.excluded is None else ESTIMATORS["k3"].value(delta)
        shift = shift + future_sum(later)
    factor = torch.ones_like(delta[:, 0]) if prepared.gate is None else prepared.gate.factor
    if prepared.scored.weight is not None:
        factor = factor * prepared.scored.weight
    return per_token(advantages, delta) - beta * factor.unsqueeze(-1) * shift


def all_shifted(advantages: Advantages, terms: Iterable[tuple[float, Prepared]]) -> Advantages:
    """The advantages less each KL that enters there with a coefficient that is not 0. [B] or [B, T]"""
    for coefficient, prepared in terms:
        if coefficient != 0 and prepared.term.placement == "advantage":
            advantages = shifted_advantages(advantages, prepared, beta=coefficient)
    return advantages


def kl_metrics(prepared: Prepared) -> dict[str, Tensor]:
    """The logged values of a KL term on a batch: detached scalars, named as in the metrics table."""
    if prepared.is_beside:
        return {"sampler/kl": masked_mean(ESTIMATORS["k3"].value(prepared.log_ratio), prepared.carried)}
    gate = {} if prepared.gate is None else prepared.gate.metrics()
    return gate | (_anchor_metrics(prepared) if prepared.term.anchor not in HELD else _held_metrics(prepared))


def _anchor_metrics(prepared: Prepared) -> dict[str, Tensor]:
    name, delta, carried, kl = prepared.term.anchor, prepared.log_ratio, prepared.carried, prepared.scored.kl
    kl = None if prepared.term.baseline == "bucket" and not prepared.term.of_prefixes else kl  # a lower bound
    allowed = carried & ~(prepared.scored.logprobs <= FORBIDDEN)  # the share below counts the others
    kl_values = masked_mean(ESTIMATORS["k3"].value(delta), allowed) if kl is None else masked_mean(kl.detach(), carried)
    return {
        f"{name}/k1": masked_mean(delta, allowed),
        f"{name}/kl": kl_values,
        f"{name}/log_ratio_clamped": share_of(delta != prepared.bounded, carried),
        f"{name}/unscored": share_of(~carried, prepared.batch.mask),
    }


def _held_metrics(prepared: Prepared) -> dict[str, Tensor]:
    term, batch, delta, carried = prepared.term, prepared.batch, prepared.log_ratio, prepared.carried
    k3, kl, sampler = ESTIMATORS["k3"].value(delta), prepared.scored.kl, batch.logprobs_of("sampler")
    metrics = {"kl/k1": masked_mean(delta, carried), "kl/k3": masked_mean(k3, carried)}
    metrics["kl/k3_sequence"] = masked_sum(k3, carried, -1).mean()
    metrics["kl/log_ratio_max"] = delta.abs().amax()
    bounded_k3 = ESTIMATORS["k3"].value(prepared.bounded)
    metrics["kl/k3_saturated"] = share_of(bounded_k3 > saturation(bounded_k3.dtype), carried)
    if term.max_log_ratio is not None:
        metrics["kl/log_ratio_clamped"] = share_of(delta.abs() > term.max_log_ratio, carried)
    if term.max_teacher_log_ratio is not None:
        raised = prepared.scored.logprobs > batch.anchors[term.anchor].logprobs
        metrics["kl/teacher_clamped"] = share_of(raised, carried)
    if kl is not None:
        metrics["kl/exact"] = masked_mean(kl.detach(), carried)
    if sampler is not None and term.max_weight is not None:
        log_w = log_weights(batch.policy_logprobs, sampler, batch.mask, horizon=term.weight_horizon)
        metrics["kl/weights_truncated"] = share_of(log_w > math.log(term.max_weight), batch.mask)
    return metrics


def mix_metrics(terms: Iterable[tuple[float, Prepared]]) -> dict[str, Tensor]:
    """The KL to a negative beta's mix: the mean k3 of x = (beta delta + coef delta_teacher) / (beta + coef), in nats.

    An upper bound: the KL to m = exp(log policy - x) before normalisation, higher by Z - 1 - log Z, Z the sum of m.
    """
    metrics, by_anchor = dict[str, Tensor](), {held.term.anchor: (coefficient, held) for coefficient, held in terms}
    for beta, held in by_anchor.values():
        coef, taught = by_anchor.get(held.term.beyond, (0.0, held))
        if beta < 0 < beta + coef:
            x = (beta * held.log_ratio + coef * taught.log_ratio.clamp(max=-FORBIDDEN)) / (beta + coef)
            metrics["kl/mix"] = masked_mean(ESTIMATORS["k3"].value(x), held.carried)
    return metrics


def penalty_name(prepared: Prepared) -> str:
    """The metric that a term's part of the loss is logged under."""
    is_own = prepared.term.anchor in HELD and not prepared.is_beside
    return "train/kl_penalty" if is_own else f"train/{prepared.term.anchor}_penalty"
