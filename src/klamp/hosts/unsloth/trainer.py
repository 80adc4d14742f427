"""The methods of Unsloth's GRPO trainer that klamp overrides, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean
from klamp.core.term import require_reference
from klamp.core.types import Batch
from klamp.hosts.common.loss import KL_SCALE, batch_of, gated_penalty
from klamp.hosts.trl import measure
from klamp.hosts.trl.mixin import KLMixin
from klamp.hosts.trl.patched import host_class
from klamp.hosts.trl.session import Scoring, Session
from klamp.hosts.trl.trainer import attach_with
from klamp.hosts.unsloth.columns import Columns
from klamp.hosts.unsloth.host import Clamps, check_version, in_place, loss_function, silent_clamps
from klamp.hosts.unsloth.loss import Added, Call, LossWithKL, stopped_calling
from klamp.hosts.unsloth.refusals import LOSS_TYPES, check_arguments, check_batch

if TYPE_CHECKING:
    from trl import GRPOTrainer as Host
else:
    Host = object

__all__ = ["UnslothMixin", "attach_to_unsloth"]

SCORED = ("old_per_token_logps", "ref_per_token_logps")
"""The tensors that Unsloth hands from generation to the loss in columns of its own."""


@dataclass
class Beyond:
    """Counts the tokens on which Unsloth's own KL would have had no gradient."""

    clamps: Clamps
    tokens: int = 0
    of: int = 0

    @torch.no_grad()
    def add(self, batch: Batch, accelerator: Any) -> float:
        """Count a micro-batch on all processes; returns the share of its tokens beyond the clamps."""
        delta = masked_log_ratio(batch.policy_logprobs, require_reference(batch), batch.mask)[batch.mask]
        below, above = self.clamps.below, self.clamps.above
        far = (delta < (-torch.inf if below is None else below)) | (delta > (torch.inf if above is None else above))
        counted = torch.tensor([far.sum(), far.numel()], device=delta.device)
        tokens, of = accelerator.reduce(counted, reduction="sum").tolist()
        self.tokens, self.of = self.tokens + tokens, self.of + of
        return tokens / max(of, 1)


class ByPosition(Host):
    """Gives klamp's hooks a generation batch ordered by position, while Unsloth's columns are kept for Unsloth."""

    _klamp: Session

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if output.get("ref_per_token_logps") is None:
            return output
        check_batch(self._klamp.kl, output)
        kept = {name: output[name] for name in SCORED if output.get(name) is not None}
        columns = _columns(self, output, output["ref_per_token_logps"])
        moved = {name: columns.take(values) for name, values in kept.items()}
        # Unsloth takes a pad token amid a completion for padding.
        moved["completion_mask"] = output["completion_mask"] * columns.present
        kept["completion_mask"] = output["completion_mask"]
        return {**output, **moved, **{f"klamp_{name}": values for name, values in kept.items()}}


class UnslothMixin(KLMixin):
    """klamp's KL, for a class that derives from it first, from `ByPosition` second and from Unsloth's third."""

    _klamp_beyond: Beyond
    _host = "Unsloth"
    _loss_types = LOSS_TYPES
    _never_exact = "Unsloth's loss is given the log-probabilities of the sampled tokens alone"

    def _old_scoring(self, output: Any, seen: list[Scoring]) -> Scoring | None:
        known = output.get("old_per_token_logps")
        if known is not None:
            return replace(seen[-1], logprobs=known)
        found = super()._old_scoring(output, seen)
        if found is None:
            return None
        return replace(found, logprobs=_columns(self, output, found.logprobs).take(found.logprobs))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Unsloth's loss with klamp's KL; an error where Unsloth's loss does not use klamp's hook."""
        beta, host_loss = self._refresh_beta(), super(KLMixin, self).compute_loss
        if inputs.get("klamp_ref_per_token_logps") is None:
            if self._klamp.kl is not None and self._klamp.kl.needs_reference:
                raise stopped_calling("a batch that the reference has not scored")
            return host_loss(model, inputs, *args, **kwargs)
        step = Step(self, inputs, beta)
        host = host_class(type(self))
        assert host is not None
        stand_in = LossWithKL(loss_function(host)[1], step.adds)
        with in_place(host, stand_in):
            loss = host_loss(model, step.as_scored(), *args, **kwargs)
        stand_in.check_called_once()
        assert step.scored is not None
        batch = batch_of(step.inputs, step.scored.logprobs)
        mode = "train" if model.training else "eval"
        self._metrics[mode]["kl/host_clamped"].append(self._klamp_beyond.add(batch, self.accelerator))
        measure.after_loss(self, step.inputs, step.scored, beta)
        return loss


class Step:
    """What klamp adds to one loss of one micro-batch.

    Args:
        trainer: a trainer with klamp's hooks.
        inputs: the micro-batch, by position.
        beta: the coefficient in force.
    """

    def __init__(self, trainer: Any, inputs: Mapping[str, Any], beta: float) -> None:
        self.trainer, self.inputs, self.beta = trainer, dict(inputs), beta
        self.scored: Scoring | None = None

    def as_scored(self) -> dict[str, Any]:
        """The micro-batch in Unsloth's columns, advantages of single tokens included."""
        inputs = dict(self.inputs)
        kept = {name: inputs.pop(f"klamp_{name}", None) for name in (*SCORED, "completion_mask")}
        inputs |= {name: values for name, values in kept.items() if values is not None}
        if inputs["advantages"].dim() == 2:
            columns = _columns(self.trainer, inputs, inputs["ref_per_token_logps"])
            inputs["advantages"] = columns.put(inputs["advantages"])
        return inputs

    def adds(self, call: Call) -> Added:
        """The KL of the tokens that Unsloth is about to train on."""
        columns = _columns(self.trainer, self.inputs, call.new)
        columns.check(self.inputs, call.input_ids, call.mask)
        policy = columns.take(call.new)
        self.scored = Scoring(self.trainer.model, (), {}, policy.detach())
        self.inputs |= {
            "completion_mask": columns.take(call.mask.bool()),
            "tool_mask": None,
            "old_per_token_logps": None if call.old is None else columns.take(call.old),
            "ref_per_token_logps": None if call.ref is None else columns.take(call.ref),
            "sampling_per_token_logps": None if call.sampling is None else columns.take(call.sampling),
        }
        batch = batch_of(self.inputs, policy)
        term, tokens = self.trainer._klamp.term, None
        if self.beta > 0 and term.placement == "loss":
            tokens = columns.put(self.beta * gated_penalty(batch, term, self.inputs.get(KL_SCALE)))
        return Added(tokens, call.advantages, _host_mean(batch))


def _columns(trainer: Any, inputs: Mapping[str, Any], scored: Tensor) -> Columns:
    return Columns.of(inputs, scored.shape[1], pad_id=trainer._tokenizer.pad_token_id)


@torch.no_grad()
def _host_mean(batch: Batch) -> Tensor:
    """The number that Unsloth logs as `kl`, without its clamps: over completions the mean of their mean k3."""
    delta = masked_log_ratio(batch.policy_logprobs, require_reference(batch), batch.mask)
    per_row = masked_mean(ESTIMATORS["k3"].value(delta), batch.mask, -1)
    return per_row.sum() / batch.mask.any(-1).sum().clamp(min=1)


def _hooks(trainer: Any) -> tuple[type, ...]:
    """The classes that must come before Unsloth's trainer class in the order of inheritance.

    Raises:
        UnsupportedVersion: an Unsloth that was not tried, or whose loss is not where it was.
    """
    check_version()
    host = host_class(type(trainer))
    assert host is not None
    trainer._klamp_beyond = Beyond(silent_clamps(loss_function(host)[1]))
    return UnslothMixin, ByPosition


def attach_to_unsloth(trainer: Any, kl: KLConfig, *, ref_model: Any = None) -> Any:
    """`klamp.trl.attach` for a trainer that Unsloth has rewritten.

    Raises:
        ConfigError: as there; an option that cannot work on Unsloth.
        UnsupportedVersion: an Unsloth that was not tried, or whose loss is not where it was.
    """
    return attach_with(trainer, kl, ref_model=ref_model, check=check_arguments, hooks=_hooks)
