"""What klamp adds to a generation batch, whole groups of all processes, before the host shuffles and splits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import masked_log_ratio, masked_sum
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import KLTerm, measure, prepare, scored_by, sequence_gate_kl
from klamp.core.types import Batch, Reduction
from klamp.doctor.alarms_kl import STEP_ZERO
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, batch_of, loss_mask
from klamp.hosts.common.control import KLControl

LENGTH_COLUMN = "reference_length"
"""The data column that gives a prompt's reference length in tokens."""


class Alone:
    """One process that has the whole batch, in the words in which hosts gather and reduce."""

    process_index = 0

    def gather(self, x: Tensor, **_: Any) -> Tensor:
        """The values of all processes, their sum, or padded values: unchanged in a single process."""
        return x

    reduce = pad_across_processes = gather


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation batch of this process, as the host hands it over."""

    inputs: Mapping[str, Any]  # the host's tensors; the completions of a prompt are neighbours, also across processes
    old_logprobs: Tensor | None  # [B, T] under the policy before the batch's first update; None: nothing needs them
    rows: Sequence[Mapping[str, Any]]  # [B] the data rows
    lengths: Tensor  # [B] completion lengths in tokens, end token included, before any masking
    group_size: int  # completions per prompt
    accelerator: Any  # gather and reduce over processes
    exact_kl: Tensor | None = None  # [B, T] exact KL of that policy; only where every completion has it
    scorable: Tensor | None = None  # [B of all processes] bool: completions with a reward; None: all

    def batch(self) -> Batch:
        """In klamp's words, as the policy saw it before its first update."""
        assert self.old_logprobs is not None
        batch = replace(batch_of(self.inputs, self.old_logprobs), old_logprobs=self.old_logprobs)
        return batch if self.exact_kl is None else batch.with_anchor("reference", kl=self.exact_kl)


def prepared(
    generation: Generation, control: KLControl, tokenizer: Any, *, beta: float, reduction: Reduction | None
) -> dict[str, Any]:
    """The host's tensors with klamp's added; `reduction` None: the host averages each micro-batch for itself."""
    kl, term = control.kl, control.kl.build_term()
    added: dict[str, Any] = dict(generation.inputs)
    if kl.excludes:
        excluded = excluded_ids(kl.kl_exclude_tokens, tokenizer)
        mask = loss_mask(generation.inputs)
        added[KL_MASK] = kl_tokens(generation.inputs["completion_ids"], mask, excluded)
        if reduction is not None:
            added[KL_SCALE] = exclusion_scale(mask, added[KL_MASK], reduction, generation.accelerator)
        generation = replace(generation, inputs=added)
    if term.clip_method != "none":
        if term.needs_reference_length:
            added[REFERENCE_LENGTH] = reference_lengths(generation, control)
        added[GATE_KL] = gate_over_processes(generation, term)
        generation = replace(generation, inputs=added)
    if term.placement == "reward" and beta != 0:
        added["advantages"] = advantages_of_rewards(generation, term, beta=beta)
    return added


def exclusion_scale(mask: Tensor, kl_mask: Tensor, reduction: Reduction, accelerator: Any) -> Tensor:
    """Tokens that the host divides by, over tokens that carry the KL, in the units of its reduction. [B]"""
    if reduction in ("sequence_sum", "fixed_length"):
        return torch.ones(len(mask), device=mask.device)
    if reduction == "sequence_mean":
        return mask.sum(-1).clamp(min=1) / kl_mask.sum(-1).clamp(min=1)
    trained, carried = accelerator.reduce(torch.stack([mask.sum(), kl_mask.sum()]), reduction="sum")
    return (trained / carried.clamp(min=1)).expand(len(mask))


def gate_over_processes(generation: Generation, term: KLTerm) -> Tensor:
    """The KL that gates each of this process's sequences, in nats; groups and batches run over all processes. [B]"""
    batch, accelerator = replace(generation.batch(), group_size=generation.group_size), generation.accelerator
    return sequence_gate_kl(measure(batch, term), gather=accelerator.gather, rank=accelerator.process_index)


def advantages_of_rewards(generation: Generation, term: KLTerm, *, beta: float) -> Tensor:
    """The advantages, less each completion's KL as far as it deviates from its group's mean. [B] or [B, T]"""
    batch = generation.batch()

    def centred(taken: Tensor) -> Tensor:
        everywhere = generation.accelerator.gather(taken)
        if generation.scorable is not None:
            everywhere = everywhere.masked_fill(~generation.scorable, torch.nan)
        groups = everywhere.view(-1, generation.group_size)
        deviations = (groups - groups.nanmean(-1, keepdim=True)).view(-1).nan_to_num(nan=0.0)
        return deviations.split(len(taken))[generation.accelerator.process_index]

    none = batch.advantages.new_zeros(len(batch.mask))
    shift = advantages_with_kl(none, prepare(batch, term), beta=beta, advantages=centred)
    return batch.advantages + (shift if batch.advantages.ndim == 1 else shift.unsqueeze(-1))


def reference_lengths(generation: Generation, control: KLControl) -> Tensor:
    """The reference length of each sequence, in tokens: given, or the mean of the first generation batch. [B]"""
    column = [row.get(LENGTH_COLUMN) for row in generation.rows]
    unknown = torch.tensor(float(control.reference_lengths(column).count(None))).to(generation.lengths.device)
    if float(generation.accelerator.reduce(unknown, reduction="sum")) > 0:
        control.take_length(_measured(generation))
    return torch.tensor(control.reference_lengths(column), dtype=torch.float32, device=generation.lengths.device)


def _measured(generation: Generation) -> float:
    batch, lengths = generation.batch(), generation.lengths
    values = ESTIMATORS["k3"].value(
        masked_log_ratio(batch.policy_logprobs, scored_by(batch, "reference").logprobs, batch.mask)
    )
    sizes = [masked_sum(values, batch.mask), batch.mask.sum(), lengths.sum(), torch.tensor(len(lengths))]
    sizes = torch.stack([size.to(lengths.device, torch.float32) for size in sizes])
    kl, tokens, length, count = generation.accelerator.reduce(sizes, reduction="sum").tolist()
    distance = kl / max(tokens, 1.0)
    if distance > STEP_ZERO.value:
        raise ConfigError(
            "the reference length cannot be measured",
            got=f"KL {distance:.2e} nats per token between policy and reference at the first generation batch",
            why="the length is measured on the first completions, and the reference did not sample them",
            fix="set kl_reference_length, or give the data a column reference_length (tokens)",
        )
    return length / count


def excluded_ids(names: Sequence[int | str], tokenizer: Any) -> list[int]:
    """Ids of the tokens named: an id, a token string, or `special` for all special tokens."""
    ids: set[int] = set()
    for name in names:
        if name == "special":
            ids.update(int(i) for i in tokenizer.all_special_ids)
            continue
        index = tokenizer.get_vocab().get(name, name) if isinstance(name, str) else name
        index = int(index) if isinstance(index, str) and index.isdigit() else index
        if not isinstance(index, int) or not 0 <= index < len(tokenizer):
            raise ConfigError(
                "kl_exclude_tokens names a token that the tokenizer does not have",
                got=repr(name),
                why="excluding nothing silently would leave its KL in the loss",
                fix=f"use an id below {len(tokenizer)}, a token as the tokenizer writes it, or 'special'",
            )
        ids.add(index)
    return sorted(ids)


def kl_tokens(ids: Tensor, mask: Tensor, excluded: Sequence[int]) -> Tensor:
    """True on the tokens that carry the KL: of those that are trained on, the ones that are not excluded. [B, T]"""
    return mask & ~torch.isin(ids, torch.tensor(list(excluded), dtype=torch.long, device=ids.device))
