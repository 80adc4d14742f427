"""klamp's KL in the GRPO trainer that Unsloth rewrites: its refusals and hooks, `attach`, `check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import masked_log_ratio, masked_mean
from klamp.core.term import scored_by
from klamp.core.types import Batch
from klamp.errors import ConfigError, UnsupportedVersion
from klamp.hosts.common.coefficient import (
    KL_SCALE,
    advantages_less_kl,
    batch_of,
    check_once,
    gated_penalty,
    stopped_calling,
)
from klamp.hosts.common.versions import check_version
from klamp.hosts.trl.checking import Listener
from klamp.hosts.trl.grpo_config import host_class
from klamp.hosts.trl.hooks import HostTrainer, KLMixin, LossHook
from klamp.hosts.trl.session import Scoring, Session
from klamp.hosts.unsloth.loss_function import Added, Call, Columns, LossWithKL, in_place, loss_function

SCORED = ("old_per_token_logps", "ref_per_token_logps")
"""The tensors that Unsloth hands from generation to the loss in columns of its own."""


class ByPosition(HostTrainer):
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
                why="klamp divides the KL by its number of tokens, in the units of Unsloth's average; these "
                "weights count no tokens",
                fix="unset UNSLOTH_GRPO_LOSS_AGGREGATION and UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE, or the kl_exclude_ "
                "fields",
            )
        columns = _columns(self, output, output["ref_per_token_logps"])
        scores = {name: output[name] for name in SCORED if output.get(name) is not None}
        moved = {name: columns.take(values) for name, values in scores.items()}
        # Unsloth takes a pad token amid a completion for padding.
        moved["completion_mask"] = output["completion_mask"] * columns.present
        return {**output, **moved, **{f"klamp_{name}": output[name] for name in moved}}


class Step(LossHook):
    """klamp's part of one loss of one micro-batch, whose inputs are ordered by position."""

    @contextmanager
    def in_place(self) -> Iterator[Any]:
        """A context in which Unsloth's loss has klamp's KL; gives the micro-batch in Unsloth's columns."""
        if self.inputs.get("klamp_ref_per_token_logps") is None:
            if self.trainer._klamp.has_kl:
                raise stopped_calling("a batch that the reference has not scored", host="Unsloth")
            yield self.inputs
            return
        host: Any = host_class(type(self.trainer))
        stand_in = LossWithKL(loss_function(host)[1], self.adds)
        with in_place(host, stand_in):
            yield self.as_scored()
        check_once(stand_in.calls, "calls", host="Unsloth")

    def as_scored(self) -> dict[str, Any]:
        """The micro-batch in Unsloth's columns."""
        inputs = dict(self.inputs)
        own = {name: inputs.pop(f"klamp_{name}", None) for name in (*SCORED, "completion_mask")}
        return inputs | {name: values for name, values in own.items() if values is not None}

    def adds(self, call: Call) -> Added:
        """The KL of the tokens that Unsloth is about to train on, in its loss or in their advantages."""
        columns = _columns(self.trainer, self.inputs, call.new)
        columns.check(self.inputs, call.input_ids, call.mask)
        policy = columns.take(call.new)
        self.scored = Scoring(policy.detach())
        scores = {"old": call.old, "ref": call.ref, "sampling": call.sampling}
        self.inputs = {
            **self.inputs,
            "completion_mask": columns.take(call.mask.bool()),
            "tool_mask": None,
            **{f"{name}_per_token_logps": None if x is None else columns.take(x) for name, x in scores.items()},
        }
        batch = batch_of(self.inputs, policy)
        term, tokens = self.trainer._klamp.term, None
        if self.beta > 0 and term.placement == "loss":
            tokens = columns.put(self.beta * gated_penalty(batch, term, self.inputs.get(KL_SCALE)))
        advantages = advantages_less_kl(batch, self.terms)
        own = advantages is batch.advantages
        return Added(tokens, call.advantages if own else columns.put(advantages), _host_mean(batch))


class UnslothMixin(KLMixin, ByPosition):
    """klamp's KL, for a class that derives from it first and from Unsloth's trainer second."""

    _loss_hook = Step
    _never_exact = "Unsloth's loss is given the log-probabilities of the sampled tokens alone"

    def _old_scoring(self, output: Any, scorings: list[Scoring]) -> Scoring | None:
        old = output.get("old_per_token_logps")
        if old is not None:
            return replace(scorings[-1], logprobs=old)
        again = super()._old_scoring(output, scorings)
        if again is None:
            return None
        return replace(again, logprobs=_columns(self, output, again.logprobs).take(again.logprobs))


def _columns(trainer: Any, inputs: Mapping[str, Any], scored: Tensor) -> Columns:
    return Columns.of(inputs, scored.shape[1], pad_id=trainer._tokenizer.pad_token_id)


@torch.no_grad()
def _host_mean(batch: Batch) -> Tensor:
    """The number that Unsloth logs as `kl`, without its clamps: over completions the mean of their mean k3."""
    delta = masked_log_ratio(batch.policy_logprobs, scored_by(batch, "reference").logprobs, batch.mask)
    per_row = masked_mean(ESTIMATORS["k3"].value(delta), batch.mask, -1)
    return per_row.sum() / batch.mask.any(-1).sum().clamp(min=1)


def unsloth_hook(trainer: Any) -> type[UnslothMixin]:
    """The class that must come before Unsloth's trainer class; refuses an Unsloth that does not fit."""
    check_version("unsloth_zoo")
    check_version("unsloth")
    loss_function(cast(type, host_class(type(trainer))))
    return UnslothMixin


def listen(listener: Listener) -> None:
    """For `check`: keep the arguments of Unsloth's loss function; if klamp does not know it, the verdict is open."""
    if (host := host_class(type(listener.trainer))) is None:
        return
    with suppress(UnsupportedVersion):
        _, original = loss_function(host)

        def apply(*args: Any) -> Any:
            listener.calls.append(Call(*args))
            return original.apply(*args)

        listener.stack.enter_context(in_place(host, SimpleNamespace(apply=apply, forward=original.forward)))


Listener.others.append(listen)
