"""What klamp adds to a generation batch before the host shuffles and splits it: whole groups, all processes.

The gate, the exclusions, the reference length and the KL in the reward or the advantage are settled here, once, so that
they do not depend on how the batch is then cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_sum
from klamp.core.penalty import advantages_with_kl, shifted_advantages
from klamp.core.term import Gate, KLTerm, sequence_gate_kl
from klamp.core.types import Batch, Reduction
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, batch_of, loss_mask
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.step_zero import STEP_ZERO_KL

LENGTH_COLUMN = "reference_length"
"""The data column that gives a prompt's reference length in tokens."""


class Alone:
    """One process that has the whole batch, in the words in which hosts gather and reduce."""

    process_index = 0

    def gather(self, x: Tensor) -> Tensor:
        """All there is."""
        return x

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """The sum, or any other reduction, of one."""
        return x

    def pad_across_processes(self, x: Tensor, **_: Any) -> Tensor:
        """Nothing to be made equal to."""
        return x


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation batch of this process, as the host hands it over."""

    inputs: Mapping[str, Any]
    """The host's tensors, the completions of a prompt next to each other (across processes where they are split)."""
    old_logprobs: Tensor | None
    """[B, T] under the policy before the batch's first update; None where nothing needs them."""
    rows: Sequence[Mapping[str, Any]]
    """[B] the data rows."""
    lengths: Tensor
    """[B] completion lengths in tokens, end token included, before any masking."""
    group_size: int
    """Completions per prompt."""
    accelerator: Any
    """gather and reduce over processes."""
    exact_kl: Tensor | None = None
    """[B, T] exact KL of that policy; only where every completion has it."""
    scorable: Tensor | None = None
    """[B of all processes] bool: completions with a reward; None: all."""

    def batch(self) -> Batch:
        """In klamp's words, as the policy saw it before its first update."""
        assert self.old_logprobs is not None
        batch = batch_of(self.inputs, self.old_logprobs)
        return replace(batch, old_logprobs=self.old_logprobs, exact_kl=self.exact_kl)

    def local(self, gathered: Tensor) -> Tensor:
        """This process's part of what was gathered from all."""
        size = self.inputs["completion_ids"].shape[0]
        start = self.accelerator.process_index * size
        return gathered[start : start + size]


def needs_old_logprobs(term: KLTerm) -> bool:
    """Whether the policy must be scored at generation: for a gate, or a KL in the reward or the advantage."""
    return term.clip_method != "none" or term.placement != "loss"


def prepared(
    generation: Generation, control: KLControl, tokenizer: Any, *, beta: float, reduction: Reduction | None
) -> dict[str, Any]:
    """The host's tensors with klamp's added: exclusions, reference length, gate, shifted advantages.

    Args:
        generation: the batch, before it is shuffled and split.
        control: the KL.
        tokenizer: finds the excluded tokens.
        beta: in force, for a KL in the reward or the advantage.
        reduction: how the host reduces tokens; None: by each micro-batch.

    Raises:
        ConfigError: a budget per token whose reference length is unknown; an excluded token that does not exist.
    """
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
    if term.placement != "loss" and beta > 0:
        added["advantages"] = shifted(generation, term, beta=beta)
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
    batch = replace(generation.batch(), group_size=generation.group_size)
    accelerator = generation.accelerator
    return sequence_gate_kl(batch, term, gather=accelerator.gather, rank=accelerator.process_index)


def shifted(generation: Generation, term: KLTerm, *, beta: float) -> Tensor:
    """Advantages with the KL in them: per completion before they are formed, or per token after. [B] or [B, T]

    With advantages that are rewards less their group's mean, and nothing else, taking the KL from the rewards is taking
    its deviation from the group's mean from the advantages.
    """
    batch = generation.batch()
    gate = Gate.of(batch, term)
    if term.placement == "advantage":
        return shifted_advantages(batch, term, beta=beta, gate=gate)

    def centred(taken: Tensor) -> Tensor:
        everywhere = generation.accelerator.gather(taken)
        if generation.scorable is not None:
            everywhere = everywhere.masked_fill(~generation.scorable, torch.nan)
        groups = everywhere.view(-1, generation.group_size)
        return generation.local((groups - groups.nanmean(-1, keepdim=True)).view(-1).nan_to_num(nan=0.0))

    none = batch.advantages.new_zeros(len(batch.mask))
    shift = advantages_with_kl(none, batch, term, beta=beta, gate=gate, advantages=centred)
    return batch.advantages + (shift if batch.advantages.ndim == 1 else shift.unsqueeze(-1))


def reference_lengths(generation: Generation, control: KLControl) -> Tensor:
    """The reference length of each of this process's sequences, in tokens. [B]

    The user's number; else the data's column; else the mean length of the first generation batch, which is a sample of
    the reference since the policy is still equal to it, measured once and frozen.

    Raises:
        ConfigError: it would have to be measured, and the policy is not the reference any more.
    """
    column = [row.get(LENGTH_COLUMN) for row in generation.rows]
    unknown = torch.tensor(float(control.reference_lengths(column).count(None))).to(generation.lengths.device)
    if float(generation.accelerator.reduce(unknown, reduction="sum")) > 0:
        control.take_length(_measured(generation))
    return torch.tensor(control.reference_lengths(column), dtype=torch.float32, device=generation.lengths.device)


def _measured(generation: Generation) -> float:
    distance = _distance(generation)
    if distance > STEP_ZERO_KL:
        raise ConfigError(
            "the reference length cannot be measured",
            got=f"KL {distance:.2e} nats per token between policy and reference at the first generation batch",
            why="the length is taken from the first completions, as a sample of the reference; they are none of it",
            fix="set kl_reference_length, or give the data a column reference_length (tokens)",
        )
    lengths = generation.lengths
    sizes = torch.stack([lengths.sum(), torch.tensor(len(lengths), device=lengths.device)])
    total, count = generation.accelerator.reduce(sizes, reduction="sum").tolist()
    return total / count


def _distance(generation: Generation) -> float:
    batch = generation.batch()
    assert batch.ref_logprobs is not None
    values = ESTIMATORS["k3"].value(masked_log_ratio(batch.policy_logprobs, batch.ref_logprobs, batch.mask))
    sizes = torch.stack([masked_sum(values, batch.mask), batch.mask.sum().float()])
    total, count = generation.accelerator.reduce(sizes, reduction="sum").tolist()
    return total / max(count, 1.0)


SPECIAL = "special"


def excluded_ids(names: Sequence[int | str], tokenizer: Any) -> list[int]:
    """Ids of the tokens named: an id, a token string, or `special` for all special tokens.

    Raises:
        ConfigError: a name that is no token of the tokenizer.
    """
    found: set[int] = set()
    for name in names:
        if name == SPECIAL:
            found.update(int(i) for i in tokenizer.all_special_ids)
            continue
        known = tokenizer.convert_tokens_to_ids(name) if isinstance(name, str) else name
        index = int(name) if isinstance(name, str) and name.isdigit() and _absent(known, tokenizer, name) else known
        if not isinstance(index, int) or not 0 <= index < len(tokenizer) or _absent(index, tokenizer, name):
            raise ConfigError(
                "kl_exclude_tokens names a token that the tokenizer does not have",
                got=repr(name),
                why="excluding nothing silently would leave its KL in the loss",
                fix=f"use an id below {len(tokenizer)}, a token as the tokenizer writes it, or 'special'",
            )
        found.add(index)
    return sorted(found)


def _absent(index: object, tokenizer: Any, name: object) -> bool:
    """Whether an unknown string was turned into the unknown token."""
    unknown = index is None or index == tokenizer.unk_token_id
    return unknown and not isinstance(name, int) and name != tokenizer.unk_token


def kl_tokens(ids: Tensor, mask: Tensor, excluded: Sequence[int]) -> Tensor:
    """True on the tokens that carry the KL.

    Args:
        ids: completions, [B, T].
        mask: tokens that are trained on, [B, T].
        excluded: ids of `kl_exclude_tokens`.
    """
    return mask & ~torch.isin(ids, torch.tensor(list(excluded), dtype=torch.long, device=ids.device))
