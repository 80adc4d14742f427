"""Computes the metrics of a step from all of its tokens.

Per-token tensors of the whole global batch go in, plain numbers come out: whichever way the batch was split into
micro-batches or processes, the result is the same, quantiles included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.core.advantages import saturated_share
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean, masked_sum


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The tokens of B completions of T positions at the start of a step's updates, all without gradient."""

    mask: Tensor
    """[B, T] bool: tokens that are trained on."""
    kl_mask: Tensor
    """[B, T] bool: tokens that carry the KL."""
    policy: Tensor
    """[B, T] log-probabilities under the policy."""
    rewards: Tensor
    """[B] rewards of the completions."""
    ended: Tensor
    """[B] bool: whether the completion has an end token."""
    lengths: Tensor
    """[B] tokens, end token included, before any masking."""
    sampler: Tensor | None = None
    """[B, T] log-probabilities under the sampler; None where it does not tell."""
    repeated: Tensor | None = None
    """[B] tokens that stand in a pair which was in their completion before; see `repeated_pairs`."""
    entropy: Tensor | None = None
    """[B, T] entropy of the policy, in nats; None where a service keeps the logits."""
    ref: Tensor | None = None
    """[B, T] log-probabilities under the reference; None at beta 0."""
    original: Tensor | None = None
    """[B, T] log-probabilities under the model that a moving reference started from."""
    exact: Tensor | None = None
    """[B, T] exact KL(policy||ref) in nats."""
    exact_forward: Tensor | None = None
    """[B, T] exact KL(ref||policy) in nats."""
    exact_rows: Tensor | None = None
    """[B] bool: completions whose exact KL was measured."""


def step_metrics(record: StepRecord, *, group_size: int) -> dict[str, float]:
    """All metrics of a step that its tokens give; names as in `METRICS`. No KL where no token carries one.

    Args:
        record: the whole global batch.
        group_size: completions per prompt; 1: they are not compared.
    """
    found = {"reward": record.rewards.mean()}
    found |= group_metrics(record.rewards, record.lengths, group_size) if group_size > 1 else {}
    found |= _length_metrics(record) | _policy_metrics(record)
    if record.ref is not None:
        found |= _kl_metrics(record, record.ref)
    if record.original is not None and bool(record.kl_mask.any()):
        delta = masked_log_ratio(record.policy, record.original, record.kl_mask)
        found |= _means("kl/{}_original", delta, record.kl_mask)
    if record.exact_rows is not None:
        found |= _exact_metrics(record, record.exact_rows)
    return {name: float(value) for name, value in found.items()}


def _means(name: str, log_ratios: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The means of k1 and k3 over tokens; `name` has a place for which."""
    return {name.format(each): masked_mean(ESTIMATORS[each].value(log_ratios), mask) for each in ("k1", "k3")}


def _length_metrics(record: StepRecord) -> dict[str, Tensor]:
    found = {"length/mean": record.lengths.float().mean(), "length/truncated": 1 - record.ended.float().mean()}
    if record.repeated is not None:
        found["length/repeated"] = record.repeated.sum() / record.lengths.sum().clamp(min=1)
    return found


def group_metrics(rewards: Tensor, lengths: Tensor, group_size: int) -> dict[str, Tensor]:
    """What groups say of rewards, and of rewards against lengths; names as in `METRICS`.

    Args:
        rewards: [B]
        lengths: [B] tokens.
        group_size: completions per prompt, which stand together.
    """
    found = {
        "reward_std": rewards.view(-1, group_size).std(-1).mean(),
        "groups/saturated": saturated_share(rewards, group_size),
    }
    correlation = reward_length_correlation(rewards, lengths, group_size)
    return found if correlation is None else found | {"length/reward_correlation": correlation}


def repeated_pairs(ids: Tensor, mask: Tensor) -> Tensor:
    """How many tokens of each completion stand in a pair of neighbours that was in it before.

    Args:
        ids: [B, T] token ids.
        mask: [B, T] bool: the completions' tokens, from the left.

    Returns:
        [B] counts, as floats.
    """
    pairs = ids[:, :-1].long() * (int(ids.max()) + 1) + ids[:, 1:].long() if ids.numel() else ids[:, :-1].long()
    outside = -1 - torch.arange(pairs.shape[1], device=ids.device)  # no two alike: what is no pair repeats nothing
    ordered = torch.where(mask[:, 1:] & mask[:, :-1], pairs, outside).sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).sum(-1).float()


def reward_length_correlation(rewards: Tensor, lengths: Tensor, group_size: int) -> Tensor | None:
    """The correlation of reward and length within groups; None where one of them is the same in every group.

    Args:
        rewards: [B]
        lengths: [B] tokens.
        group_size: completions per prompt, which stand together.
    """
    reward, length = (x.double().view(-1, group_size) for x in (rewards, lengths))
    reward, length = reward - reward.mean(-1, keepdim=True), length - length.mean(-1, keepdim=True)
    sizes = reward.square().sum() * length.square().sum()
    return (reward * length).sum() / sizes.sqrt() if bool(sizes > 1e-12) else None


def _policy_metrics(record: StepRecord) -> dict[str, Tensor]:
    entropy = {} if record.entropy is None else {"policy/entropy": masked_mean(record.entropy, record.mask)}
    found = entropy | {"policy/logp_mean": masked_mean(record.policy, record.mask)}
    if record.sampler is None:
        return found
    return found | _means("sampler/{}", masked_log_ratio(record.sampler, record.policy, record.mask), record.mask)


def _kl_metrics(record: StepRecord, ref: Tensor) -> dict[str, Tensor]:
    mask = record.kl_mask
    delta = masked_log_ratio(record.policy, ref, mask)
    found = {"ref/logp_mean": masked_mean(ref, record.mask)}
    if not bool(mask.any()):
        return found
    for name in ("k1", "k3"):
        found[f"kl/{name}_sequence"] = masked_sum(ESTIMATORS[name].value(delta), mask, -1).mean()
    return found | _means("kl/{}", delta, mask) | largest_log_ratios(delta[mask])


def largest_log_ratios(log_ratios: Tensor) -> dict[str, Tensor]:
    """The largest |log-ratio| of single tokens and the 99th percentile, in nats; `log_ratios` [n], at least one."""
    sizes = log_ratios.abs().sort().values
    return {"kl/log_ratio_max": sizes[-1], "kl/log_ratio_p99": sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))]}


def _exact_metrics(record: StepRecord, rows: Tensor) -> dict[str, Tensor]:
    mask = record.kl_mask[rows]
    found: dict[str, Tensor] = {}
    if not bool(mask.any()):
        return found
    for name, value in (("exact", record.exact), ("exact_forward", record.exact_forward)):
        if value is not None:
            found[f"kl/{name}"] = masked_mean(value[rows], mask)
    if record.exact is not None:
        found["kl/exact_sequence"] = masked_sum(record.exact[rows], mask, -1).mean()
    return found
