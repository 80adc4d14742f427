"""The penalty of a micro-batch, and the coefficient that puts it into the host's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klamp.core.penalty import all_shifted, token_penalty
from klamp.core.term import KLTerm, Weighted, prepare, prepare_terms
from klamp.core.types import Advantages, Batch, Scored, held_anchors
from klamp.errors import UnsupportedVersion

KL_MASK, KL_SCALE = "klamp_kl_mask", "klamp_kl_scale"
GATE_KL, REFERENCE_LENGTH = "klamp_gate_kl", "klamp_reference_length"
TEACHER = "klamp_teacher_logprobs"
"""What klamp adds to a host's batch; the host shuffles and splits it with the rest."""


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens that the host trains on, [B, T] bool."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if inputs.get("tool_mask") is not None else mask


def batch_of(inputs: Mapping[str, Any], policy_logprobs: Tensor) -> Batch:
    """A host's batch in klamp's words; the sampler is vLLM's report, else (and where that is NaN) the old policy."""
    old = inputs.get("old_per_token_logps")
    recorded = policy_logprobs.detach() if old is None else old
    sampler = inputs.get("sampling_per_token_logps")
    sampler = recorded if sampler is None else torch.where(sampler.isnan(), recorded.to(sampler), sampler)
    ref, mask, gate = (inputs.get(name) for name in ("ref_per_token_logps", KL_MASK, GATE_KL))
    anchors = held_anchors(ref, sampler, mask=mask, gate=gate)
    if inputs.get(TEACHER) is not None:
        anchors["teacher"] = Scored(inputs[TEACHER])
    return Batch(
        policy_logprobs=policy_logprobs,
        mask=loss_mask(inputs),
        advantages=inputs["advantages"],
        old_logprobs=old,
        anchors=anchors,
        reference_length=inputs.get(REFERENCE_LENGTH),
    )


def gated_penalty(batch: Batch, term: KLTerm, scale: Tensor | None = None) -> Tensor:
    """klamp's clipped penalty without beta, [B, T]; `scale` [B]: see `exclusion_scale`, None: of this micro-batch."""
    prepared = prepare(batch, term)
    penalty = token_penalty(prepared)
    if prepared.excluded is None:
        return penalty
    if scale is None:
        return penalty * (batch.mask.sum() / prepared.carried.sum().clamp(min=1))
    return penalty * scale.unsqueeze(-1)


def advantages_less_kl(batch: Batch, terms: Sequence[Weighted]) -> Advantages:
    """The advantages less each KL that enters there, of the batch's policy (the present one). [B] or [B, T]"""
    in_advantage = [weighted for weighted in terms if weighted.term.placement == "advantage"]
    return all_shifted(batch.advantages, prepare_terms(batch, in_advantage))


class ShiftedInputs(dict[str, Any]):
    """A micro-batch whose advantages are computed where the host's loss reads them, after it scored the policy."""

    def __init__(self, inputs: Mapping[str, Any], advantages: Callable[[], Advantages]) -> None:
        super().__init__(inputs)
        self.uses, self._advantages = 0, advantages

    def __getitem__(self, name: str) -> Any:
        if name != "advantages":
            return super().__getitem__(name)
        self.uses += 1
        return self._advantages()


class Coefficient(float):
    """A host's beta: multiplied by any per-token KL, it gives beta times klamp's penalty, [B, T]."""

    uses: int
    _penalty: Callable[[], Tensor]

    def __new__(cls, value: float, penalty: Callable[[], Tensor]) -> Coefficient:
        made = super().__new__(cls, value)
        made.uses, made._penalty = 0, penalty
        return made

    def _times(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return float(self) * other
        self.uses += 1
        penalty = self._penalty()
        if penalty.shape != other.shape:
            raise stopped_calling(f"a KL of shape {tuple(other.shape)} where {tuple(penalty.shape)} was expected")
        return penalty.to(other.dtype)

    __mul__ = _times
    __rmul__ = _times


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of a model, trainer or module is another value; wrappers and hooks stay."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if not had:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def stopped_calling(got: str, *, host: str = "the host") -> UnsupportedVersion:
    """The error for a host whose loss does not come by where klamp puts its KL."""
    return UnsupportedVersion(
        f"{host}'s loss does not take the KL where klamp puts it",
        got=got,
        why="klamp's KL enters in the middle of the host's own loss; without it the run would train without the KL "
        "that was asked for",
        fix="use a version of the host in klamp's declared range, and no loss (fused, or overridden in a subclass) "
        "that computes the KL elsewhere",
    )


def check_once(times: int, what: str, *, host: str = "the host") -> None:
    """Raise if one loss of a host came by a place of klamp's `times` times, and not once."""
    if times != 1:
        raise stopped_calling(f"{times} {what} in one loss, where there should be 1", host=host)
