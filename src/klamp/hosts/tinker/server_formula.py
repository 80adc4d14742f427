"""The loss of one datum in the form that torch.fx can trace, and the rows of numbers that it reads.

Everything that changes from step to step (beta, denominators, masks) travels as rows of the datums, so that one traced
loss serves a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import COEFFICIENTS, saturation, weighted_value
from klamp.core.masking import masked, reduce_tokens, total_denominator
from klamp.core.objective import Objective
from klamp.core.penalty import shifted_advantages
from klamp.core.term import KLTerm
from klamp.core.types import LossPart, Reduction
from klamp.hosts.tinker.options import Settings
from klamp.hosts.tinker.padded import Rows

INPUTS = ("behavior_logprobs", "ref_logprobs", "advantages", "policy_weights", "kl_weights", "kl_shares")
"""Rows of a datum that the traced loss reads; its first parameter must be `logprobs`, the policy's."""


def on_server(metric: str) -> str:
    """What the SDK lets the server call a metric: `custom/`, the name without its slash, and how datums add up."""
    return f"custom/{metric.replace('/', '_')}:sum"


def datum_loss(objective: Objective) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The loss of one datum as a function that torch.fx can trace: torch calls only, numbers as constants."""
    low, high, term = 1 - objective.clip_low, 1 + objective.clip_high, objective.kl
    in_loss = term.placement == "loss"

    def klamp_grpo_kl(  # the SDK takes the names of the rows from these parameters
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        policy_weights: Tensor,
        kl_weights: Tensor,
        kl_shares: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        zeros = torch.zeros_like(logprobs)
        ratio = torch.where(policy_weights != 0, logprobs - behavior_logprobs, zeros).exp()
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        policy = (policy_weights * surrogate).sum()
        seen = torch.where(kl_shares != 0, (logprobs - ref_logprobs).detach(), zeros)
        names = {f"kl/{name}": name for name in ("k1", "k3")}
        metrics = {on_server(ours): (kl_shares * ESTIMATORS[name].value(seen)).sum() for ours, name in names.items()}
        metrics[on_server("train/policy_loss")] = policy.detach()
        if not in_loss:
            return policy, metrics
        delta = torch.where(kl_weights != 0, (logprobs - ref_logprobs).detach(), zeros)
        log_w = torch.where(kl_weights != 0, (logprobs - behavior_logprobs).detach(), zeros)
        value, coefficient = _penalty(term, delta, log_w)
        kl = (kl_weights * (value + coefficient * (logprobs - logprobs.detach()))).sum()
        metrics[on_server("train/kl_penalty")] = kl.detach()
        return policy + kl, metrics

    return klamp_grpo_kl


def _penalty(term: KLTerm, delta: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Value and coefficient of the gradient, per token: the core's own functions, with horizon `token`."""
    if term.max_log_ratio is not None:
        delta = delta.clamp(-term.max_log_ratio, term.max_log_ratio)
    if term.off_policy == "none":
        log_w = torch.zeros_like(delta)
    elif term.max_weight is not None:
        log_w = log_w.clamp(max=math.log(term.max_weight))
    value: Any = term.value  # never `exact`, which is refused before
    found = weighted_value(value, log_w, delta)
    coefficient = COEFFICIENTS["token", term.gradient](value, log_w, delta)
    # A datum is a sequence, and the server computes in float32; see `penalty_from_weights`.
    finite = coefficient.isfinite().all() & delta.isfinite()
    return torch.where(finite, found.clamp(max=saturation(torch.float32)), found), coefficient


def input_rows(rows: Rows, settings: Settings) -> dict[str, Tensor]:
    """What the traced loss reads, padded; beta and the denominators are in the weights. [B, N] each"""
    objective = settings.objective
    carried = rows.mask if rows.kl_mask is None else rows.mask & rows.kl_mask
    weights = _weights(rows.mask, rows.mask, objective.reduction, settings)
    kl_weights = _weights(rows.mask, carried, objective.kl.normalizer or objective.reduction, settings, part="kl")
    advantages, beta = rows.advantages, objective.beta
    if objective.kl.placement != "loss":
        if objective.kl.placement == "advantage" and beta > 0:
            advantages = shifted_advantages(rows.batch(rows.logprobs), objective.kl, beta=beta)
        beta = 0.0
    ref = rows.logprobs if rows.ref_logprobs is None else rows.ref_logprobs
    shown = carried if rows.ref_logprobs is not None else torch.zeros_like(carried)
    columns = (
        masked(rows.logprobs, rows.mask),
        masked(ref, rows.mask),
        masked(advantages, rows.mask),
        weights,
        beta * masked(kl_weights, carried),
        shown / shown.sum().clamp(min=1),
    )
    return dict(zip(INPUTS, columns, strict=True))


def _weights(
    mask: Tensor, counted: Tensor, reduction: Reduction, settings: Settings, *, part: LossPart = "policy"
) -> Tensor:
    """What each token is multiplied with: a reduction is linear, so its gradient at zero. [B, N]"""
    length = settings.objective.max_length
    denominator = None
    if settings.totals is not None:
        denominator = total_denominator(settings.totals, reduction, length=length, part=part)
    tokens = torch.zeros(mask.shape, requires_grad=True)
    total = reduce_tokens(tokens, mask, reduction, length=length, denominator=denominator, counted=counted)
    return torch.autograd.grad(total, tokens)[0]
