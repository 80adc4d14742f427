"""What was measured of the KL in one optimizer step, added up over its micro-batches and processes exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import masked_mean
from klamp.core.penalty import kl_metrics
from klamp.core.term import Distances, Gate, KLTerm, require_reference
from klamp.core.types import Batch
from klamp.diagnostics.metrics import Counted, averaged_over
from klamp.hosts.common.step_metrics import largest_log_ratios


class Window:
    """Sums and counts since the last `emit`."""

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
        counts: dict[Counted | None, int | Tensor] = {
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
        empty = torch.zeros(2, dtype=torch.float64, device=count.device)
        both = torch.stack([torch.where(count > 0, mean * count, 0.0), count])
        self.sums[name] = self.sums.get(name, empty) + both

    def emit(self, accelerator: Any) -> dict[str, float]:
        """The means of the step over all processes, names as in `klamp.diagnostics.metrics`; and start again."""
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
