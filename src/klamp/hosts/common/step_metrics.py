"""Computes the metrics of an optimizer step, the same however its batch was split, quantiles included.

`step_metrics` takes the tokens of the whole global batch; a `Window` adds up micro-batches and processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.core.advantages import saturated_share
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean, masked_sum
from klamp.core.penalty import kl_metrics
from klamp.core.term import Distances, Gate, KLTerm, require_reference
from klamp.core.types import Batch
from klamp.doctor.metrics import Counted, averaged_over, check_metrics


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
    """All metrics that the tokens of a whole global batch give; names as in `METRICS`. No KL where no token has one."""
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
    return {name.format(each): masked_mean(ESTIMATORS[each].value(log_ratios), mask) for each in ("k1", "k3")}


def _length_metrics(record: StepRecord) -> dict[str, Tensor]:
    found = {"length/mean": record.lengths.float().mean(), "length/truncated": 1 - record.ended.float().mean()}
    if record.repeated is not None:
        found["length/repeated"] = record.repeated.sum() / record.lengths.sum().clamp(min=1)
    return found


def group_metrics(rewards: Tensor, lengths: Tensor, group_size: int) -> dict[str, Tensor]:
    """What groups say of rewards [B], and of rewards against lengths [B]; a group's are neighbours."""
    found = {
        "reward_std": rewards.view(-1, group_size).std(-1).mean(),
        "groups/saturated": saturated_share(rewards, group_size),
    }
    correlation = reward_length_correlation(rewards, lengths, group_size)
    return found if correlation is None else found | {"length/reward_correlation": correlation}


def repeated_pairs(ids: Tensor, mask: Tensor) -> Tensor:
    """How many tokens of each completion stand in a pair of neighbours that was in it before, [B] as floats.

    `ids` and `mask` are [B, T], the mask True on a completion's tokens, from the left.
    """
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
    if not bool(mask.any()):
        return {}
    values = {"kl/exact": record.exact, "kl/exact_forward": record.exact_forward}
    found = {name: masked_mean(value[rows], mask) for name, value in values.items() if value is not None}
    if record.exact is not None:
        found["kl/exact_sequence"] = masked_sum(record.exact[rows], mask, -1).mean()
    return found


class Window:
    """What was measured of the KL since the last `emit`, as sums and counts."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.log_ratios: list[Tensor] = []

    @torch.no_grad()
    def add(self, batch: Batch, term: KLTerm, gate: Gate | None) -> None:
        """Take in a micro-batch that the reference (or the teacher, whose term it is) has scored."""
        known = Distances.of(batch, term)
        means = kl_metrics(batch, term, known) | ({} if gate is None else gate.metrics())
        means.pop("kl/log_ratio_max", None)
        means["policy/logp_mean"] = masked_mean(batch.policy_logprobs, batch.mask)
        if term.anchor == "reference":
            means["ref/logp_mean"] = masked_mean(require_reference(batch), batch.mask)
        means["length/mean"] = batch.mask.sum(-1).double().mean()
        counts: dict[Counted, int | Tensor] = {
            "completions": len(batch.mask),
            "tokens": batch.mask.sum(),
            "KL tokens": known.carried.sum(),
        }
        for name, mean in means.items():
            self._count(name, mean.double(), torch.as_tensor(counts[averaged_over(name)], device=mean.device).double())
        if term.anchor == "reference":
            self.log_ratios.append(known.log_ratio[known.carried].float())

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
        found = {name: float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count > 0}
        if self.log_ratios:
            log_ratios = accelerator.pad_across_processes(torch.cat(self.log_ratios), dim=0, pad_index=torch.nan)
            log_ratios = accelerator.gather(log_ratios)
            log_ratios = log_ratios[~log_ratios.isnan()]
            if len(log_ratios):
                found |= {name: float(size) for name, size in largest_log_ratios(log_ratios).items()}
                k3 = ESTIMATORS["k3"].value(log_ratios)
                found["kl/k3_max"], found["kl/k3_min"] = float(k3.max()), float(k3.min())
        self._clear()
        return found
