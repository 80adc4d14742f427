"""The metrics of an optimizer step: `step_metrics` of its whole batch, a `Window` of micro-batches and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.core.advantages import saturated_share
from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import masked_log_ratio, masked_mean, masked_sum, repeated_share
from klamp.core.penalty import kl_metrics
from klamp.core.term import Prepared
from klamp.doctor.metrics import Counted, averaged_over, check_metrics


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The tokens of B completions of T positions at the start of a step's updates, all without gradient."""

    mask: Tensor  # [B, T] bool: tokens that are trained on
    kl_mask: Tensor  # [B, T] bool: tokens that carry the KL
    policy: Tensor  # [B, T] log-probabilities under the policy
    rewards: Tensor  # [B] rewards of the completions
    ended: Tensor  # [B] bool: whether the completion has an end token
    lengths: Tensor  # [B] tokens, end token included, before any masking
    sampler: Tensor | None = None  # [B, T] log-probabilities under the sampler; None where it does not tell
    repeated: Tensor | None = None  # [B] tokens in a pair that their completion had before; see `repeated_pairs`
    entropy: Tensor | None = None  # [B, T] entropy of the policy, in nats; None where a service keeps the logits
    ref: Tensor | None = None  # [B, T] log-probabilities under the reference; None at beta 0
    original: Tensor | None = None  # [B, T] log-probabilities under the model that a moving reference started from
    exact: Tensor | None = None  # [B, T] exact KL(policy||ref) in nats
    exact_forward: Tensor | None = None  # [B, T] exact KL(ref||policy) in nats
    exact_rows: Tensor | None = None  # [B] bool: completions whose exact KL was measured


def step_metrics(record: StepRecord, *, group_size: int) -> dict[str, float]:
    """All metrics that the tokens of a whole global batch give; names as in `METRICS`. No KL if no token has one."""
    metrics = {"reward": record.rewards.mean(), "policy/logp_mean": masked_mean(record.policy, record.mask)}
    metrics |= group_metrics(record.rewards, record.lengths, group_size) if group_size > 1 else {}
    metrics |= {"length/mean": record.lengths.float().mean(), "length/truncated": 1 - record.ended.float().mean()}
    if record.repeated is not None:
        metrics["length/repeated"] = record.repeated.sum() / record.lengths.sum().clamp(min=1)
    if record.entropy is not None:
        metrics["policy/entropy"] = masked_mean(record.entropy, record.mask)
    if record.sampler is not None:
        metrics |= _means("sampler/{}", masked_log_ratio(record.sampler, record.policy, record.mask), record.mask)
    if record.ref is not None:
        metrics["ref/logp_mean"] = masked_mean(record.ref, record.mask)
        metrics |= _kl_metrics(record, record.ref) if bool(record.kl_mask.any()) else {}
    if record.original is not None and bool(record.kl_mask.any()):
        log_ratios = masked_log_ratio(record.policy, record.original, record.kl_mask)
        metrics |= _means("kl/{}_original", log_ratios, record.kl_mask)
    if record.exact_rows is not None:
        metrics |= _exact_metrics(record, record.exact_rows)
    return {name: float(value) for name, value in metrics.items()}


def _means(name: str, log_ratios: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {name.format(k): masked_mean(ESTIMATORS[k].value(log_ratios), mask) for k in ("k1", "k3")}


def _kl_metrics(record: StepRecord, ref: Tensor) -> dict[str, Tensor]:
    mask = record.kl_mask
    log_ratios = masked_log_ratio(record.policy, ref, mask)
    sums = {k: masked_sum(ESTIMATORS[k].value(log_ratios), mask, -1).mean() for k in ("k1", "k3")}
    of_sequences = {f"kl/{k}_sequence": value for k, value in sums.items()}
    return of_sequences | _means("kl/{}", log_ratios, mask) | largest_log_ratios(log_ratios[mask])


def _exact_metrics(record: StepRecord, rows: Tensor) -> dict[str, Tensor]:
    mask = record.kl_mask[rows]
    if not bool(mask.any()):
        return {}
    values = {"kl/exact": record.exact, "kl/exact_forward": record.exact_forward}
    metrics = {name: masked_mean(value[rows], mask) for name, value in values.items() if value is not None}
    if record.exact is not None:
        metrics["kl/exact_sequence"] = masked_sum(record.exact[rows], mask, -1).mean()
    return metrics


def group_metrics(rewards: Tensor, lengths: Tensor, group_size: int) -> dict[str, Tensor]:
    """What groups say of rewards [B], and of rewards against lengths [B]; a group's are neighbours."""
    metrics = {
        "reward_std": rewards.view(-1, group_size).std(-1).mean(),
        "groups/saturated": saturated_share(rewards, group_size),
    }
    correlation = reward_length_correlation(rewards, lengths, group_size)
    return metrics if correlation is None else metrics | {"length/reward_correlation": correlation}


def repeated_pairs(ids: Tensor, mask: Tensor) -> Tensor:
    """How many tokens of each completion, [B, T] from the left, are in a pair that it had before. [B] as floats"""
    pairs = ids[:, :-1].long() * (int(ids.max()) + 1) + ids[:, 1:].long() if ids.numel() else ids[:, :-1].long()
    outside = -1 - torch.arange(pairs.shape[1], device=ids.device)  # no two alike: what is no pair repeats nothing
    ordered = torch.where(mask[:, 1:] & mask[:, :-1], pairs, outside).sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).sum(-1).float()


def reward_length_correlation(rewards: Tensor, lengths: Tensor, group_size: int) -> Tensor | None:
    """The correlation of reward and length within groups; None if one of them is the same in every group."""
    reward, length = (x.double().view(-1, group_size) for x in (rewards, lengths))
    reward, length = reward - reward.mean(-1, keepdim=True), length - length.mean(-1, keepdim=True)
    sizes = reward.square().sum() * length.square().sum()
    return (reward * length).sum() / sizes.sqrt() if bool(sizes > 1e-12) else None


def largest_log_ratios(log_ratios: Tensor) -> dict[str, Tensor]:
    """The largest |log-ratio| of single tokens and the 99th percentile, in nats; `log_ratios` [n], at least one."""
    sizes = log_ratios.abs().sort().values
    return {"kl/log_ratio_max": sizes[-1], "kl/log_ratio_p99": sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))]}


class Window:
    """What was measured of the KL since the last `emit`, as sums and counts."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.log_ratios: list[Tensor] = []

    @torch.no_grad()
    def add(self, prepared: Prepared) -> None:
        """Take in a micro-batch that the term's anchor has scored."""
        batch, anchor, means = prepared.batch, prepared.term.anchor, kl_metrics(prepared)
        means.pop("kl/log_ratio_max", None)
        means["policy/logp_mean"] = masked_mean(batch.policy_logprobs, batch.mask)
        if anchor == "reference":
            means["ref/logp_mean"] = masked_mean(prepared.scored.logprobs, batch.mask)
        elif anchor == "teacher":
            scores = prepared.scored.logprobs
            means["teacher/repeated"] = repeated_share(batch.policy_logprobs, scores, prepared.carried)
        means["length/mean"] = batch.mask.sum(-1).double().mean()
        self.add_means(means, batch.mask, prepared.carried)
        if anchor == "reference":
            self.log_ratios.append(prepared.log_ratio[prepared.carried].float())

    def add_means(self, means: Mapping[str, Tensor], mask: Tensor, carried: Tensor) -> None:
        """Take in means over the completions of a micro-batch, its tokens, or those that carry the KL."""
        counts: dict[Counted, Any] = {"completions": len(mask), "tokens": mask.sum(), "KL tokens": carried.sum()}
        for name, mean in means.items():
            self._count(name, mean.double(), torch.as_tensor(counts[averaged_over(name)], device=mean.device).double())

    def add_values(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Take in what was measured at some tokens of a micro-batch, [b, T]."""
        self._count(name, masked_mean(values.detach(), mask).double(), mask.sum().double())

    def _count(self, name: str, mean: Tensor, count: Tensor) -> None:
        check_metrics([name])
        empty = torch.zeros(2, dtype=torch.float64, device=count.device)
        both = torch.stack([torch.where(count > 0, mean * count, 0.0), count])
        self.sums[name] = self.sums.get(name, empty) + both

    def emit(self, accelerator: Any) -> dict[str, float]:
        """The means of the step over all processes, names as in `klamp.doctor.metrics`; and start again."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        totals = accelerator.reduce(torch.stack([self.sums[name] for name in names]), reduction="sum")
        metrics = {name: float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count > 0}
        if self.log_ratios:
            log_ratios = accelerator.pad_across_processes(torch.cat(self.log_ratios), dim=0, pad_index=torch.nan)
            log_ratios = accelerator.gather(log_ratios)
            log_ratios = log_ratios[~log_ratios.isnan()]
            if len(log_ratios):
                k3 = ESTIMATORS["k3"].value(log_ratios)
                extremes = largest_log_ratios(log_ratios) | {"kl/k3_max": k3.max(), "kl/k3_min": k3.min()}
                metrics |= {name: float(value) for name, value in extremes.items()}
        self._clear()
        return metrics
