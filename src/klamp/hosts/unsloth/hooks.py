"""klamp's KL in the GRPO trainer that Unsloth rewrites: its refusals and hooks, `attach`, `effective`, `check`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klamp.config import TRL_LOSS_TYPES
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean
from klamp.core.term import require_reference
from klamp.core.types import Batch, Reduction
from klamp.errors import ConfigError, UnsupportedVersion
from klamp.hosts.common.coefficient import KL_SCALE, batch_of, check_once, gated_penalty, stopped_calling
from klamp.hosts.common.effective import Effective
from klamp.hosts.common.versions import check_version
from klamp.hosts.trl import measure
from klamp.hosts.trl.checking import Listener
from klamp.hosts.trl.effective_in_trl import read_effective
from klamp.hosts.trl.grpo_config import host_class
from klamp.hosts.trl.hooks import Host, KLMixin
from klamp.hosts.trl.session import Scoring, Session
from klamp.hosts.unsloth.loss_function import LOSS, Added, Call, Columns, LossWithKL, in_place, loss_function

LOSS_TYPES: Mapping[str, Reduction | None] = {**TRL_LOSS_TYPES, "bnpo": "token_mean"}
"""How Unsloth's loss types make tokens a number: as TRL's, but bnpo by the tokens of the whole batch."""

SCORED = ("old_per_token_logps", "ref_per_token_logps")
"""The tensors that Unsloth hands from generation to the loss in columns of its own."""


class ByPosition(Host):
    """Gives klamp's hooks a generation batch ordered by position, while Unsloth's columns are kept for Unsloth."""

    _klamp: Session

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if output.get("ref_per_token_logps") is None:
            return output
        kl = self._klamp.kl
        if kl is not None and kl.excludes and output.get("unsloth_sample_weight") is not None:
            raise ConfigError(
                "tokens cannot be left out of the KL under Unsloth's weights of whole completions",
                why="klamp divides the KL by the tokens that carry it, in the units of Unsloth's average; these "
                "weights are none",
                fix="unset UNSLOTH_GRPO_LOSS_AGGREGATION and UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE, or the kl_exclude_ "
                "fields",
            )
        kept = {name: output[name] for name in SCORED if output.get(name) is not None}
        columns = _columns(self, output, output["ref_per_token_logps"])
        moved = {name: columns.take(values) for name, values in kept.items()}
        # Unsloth takes a pad token amid a completion for padding.
        moved["completion_mask"] = output["completion_mask"] * columns.present
        kept["completion_mask"] = output["completion_mask"]
        return {**output, **moved, **{f"klamp_{name}": values for name, values in kept.items()}}


class UnslothMixin(KLMixin, ByPosition):
    """klamp's KL, for a class that derives from it first and from Unsloth's trainer second."""

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
                raise stopped_calling("a batch that the reference has not scored", host="Unsloth")
            return host_loss(model, inputs, *args, **kwargs)
        step = Step(self, inputs, beta)
        host = host_class(type(self))
        assert host is not None
        stand_in = LossWithKL(loss_function(host)[1], step.adds)
        with in_place(host, stand_in):
            loss = host_loss(model, step.as_scored(), *args, **kwargs)
        check_once(stand_in.calls, "calls", host="Unsloth")
        assert step.scored is not None
        measure.after_loss(self, step.inputs, step.scored, beta)
        return loss


class Step:
    """What klamp adds to one loss of one micro-batch, whose inputs are ordered by position."""

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
        self.scored = Scoring(policy.detach())
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


def unsloth_hook(trainer: Any) -> type[UnslothMixin]:
    """The class that must come before Unsloth's trainer class; refuses an Unsloth that does not fit."""
    check_version("unsloth_zoo")
    check_version("unsloth")
    host = host_class(type(trainer))
    assert host is not None
    loss_function(host)
    return UnslothMixin


K3_STOPS = "Unsloth's own k3 stops at 10 nats per token: past a log-ratio of -2.61 and +11.00 it has no gradient"
"""Measured with each version that was tried."""


def read_effective_on_unsloth(trainer: Any) -> Effective:
    """What the KL of a trainer that Unsloth has rewritten will really do; see `klamp.trl.effective`."""
    host = host_class(type(trainer))
    assert host is not None
    found = read_effective(trainer, host="Unsloth", loss_types=LOSS_TYPES)
    own = any(term.term == "Unsloth's own" for term in found.terms)
    note = f"{K3_STOPS}, and nothing says so" if own else f"{K3_STOPS}; klamp's KL has none of these clamps"
    return replace(found, host=f"unsloth {check_version('unsloth')}, {found.host}", notes=(*found.notes, note))


def listen(listener: Listener) -> None:
    """For `check`: keep the arguments of Unsloth's loss function; if klamp does not know it, the verdict is open."""
    if (host := host_class(type(listener.trainer))) is None:
        return
    with suppress(UnsupportedVersion):
        names, original = loss_function(host)

        def apply(*given: Any) -> Any:
            listener.calls.append(Call(*given))
            return original.apply(*given)

        listener.put(names, LOSS, SimpleNamespace(apply=apply, forward=original.forward))


Listener.others.append(listen)
