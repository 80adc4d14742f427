"""Whether the engine that samples for TRL has the policy's weights: looked at when its log-probabilities drift off."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
import trl
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from klamp.core.arguments import describe
from klamp.diagnostics.sync import SAME, SyncReport
from klamp.errors import ConfigError, KLWarning, UnsupportedVersion
from klamp.hosts.common.coefficient import loss_mask
from klamp.hosts.common.sampler_weights import check_packing, check_sync
from klamp.hosts.trl.exact import weights_are_split

ROWS = 4
"""Completions that are scored again."""
FURTHER = 2.0
"""How many times further off than at the last look the sampler has to be for another one."""


def check_engine(trainer: Any) -> None:
    """Refuse a trainer with an engine in its own process that would not take the policy's weights.

    Args:
        trainer: built, and its engine with it.

    Raises:
        ConfigError: vLLM on a CPU, which packs them.
    """
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is not None:
        check_packing(engine.llm_engine.model_config.dtype)


class Seen(Protocol):
    """What is remembered from look to look."""

    sync_gap: float
    """How far off the sampler's log-probabilities were when they were last looked into, nats per token."""
    out_of_sync: bool
    """Whether the user was told that the sampler is out of sync."""


def watch(trainer: Any, output: Any) -> None:
    """Warn once, with the likely cause, where the sampler's log-probabilities are not those of the policy.

    Args:
        trainer: klamp's, whose policy it is.
        output: the generation batch; nothing happens where the sampler tells no log-probabilities.
    """
    session = trainer._klamp
    found = drift(trainer, output, session, starts_at_reference=session.starts_at_reference)
    if found:
        trainer._caution(found)


def drift(trainer: Any, output: Any, seen: Seen, *, starts_at_reference: bool = True) -> str:
    """What is wrong with the sampler, the first time that it is; "" where nothing is, or it was told already.

    Args:
        trainer: whose policy it is; its weights are those that the completions were sampled with.
        output: a generation batch, or a part of it.
        seen: of the looks before; updated.
        starts_at_reference: whether the trainer's reference has the weights that training started from.
    """
    told, own = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
    if told is None or own is None or seen.out_of_sync or weights_are_split(trainer):
        return ""
    mask = loss_mask(output) & told.isfinite()
    gap = float((told - own)[mask].abs().mean()) if bool(mask.any()) else 0.0
    if gap <= max(SAME.value, FURTHER * seen.sync_gap):
        return ""
    seen.sync_gap = gap
    report = look(trainer, output, starts_at_reference=starts_at_reference)
    seen.out_of_sync = not report.in_sync
    step = trainer.state.global_step + 1
    return "" if report.in_sync else f"sampler and trainer are out of sync at step {step}: {report}"


def look(trainer: Any, output: Any, *, starts_at_reference: bool = True) -> SyncReport:
    """Score some completions of a generation batch again, and say whose log-probabilities were reported."""
    mask = loss_mask(output)
    told = output["sampling_per_token_logps"].masked_fill(~mask, torch.nan)
    own = output["old_per_token_logps"].masked_fill(~mask, torch.nan)
    written = output["completion_mask"].bool()
    rows = range(min(ROWS, len(written)))
    args, start = trainer.args, trainer.ref_model
    if start is None or args.sync_ref_model or not starts_at_reference or not trainer.state.global_step:
        start = None
    return check_sync(
        trainer.accelerator.unwrap_model(trainer.model),
        [output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist() for i in rows],
        [output["completion_ids"][i][written[i]].tolist() for i in rows],
        [told[i][written[i]].tolist() for i in rows],
        trainer_logprobs=[own[i][written[i]].tolist() for i in rows],
        temperature=trainer.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        start=None if start is None else trainer.accelerator.unwrap_model(start),
    )


def warn(text: str) -> None:
    """Say a caution as a warning of Python's."""
    warnings.warn(text[0].upper() + text[1:], KLWarning, stacklevel=3)


class SyncCallback(TrainerCallback):
    """Looks at whether the engine that samples for a stock TRL trainer has the policy's weights, while the run goes on.

    `trainer.add_callback(SyncCallback(trainer))`. Where the log-probabilities that vLLM reports drift off the policy's,
    a few completions are scored again before the optimizer's step; a `KLWarning` says once what is likely wrong. It
    reads the batch that TRL keeps between its updates, with the policy's log-probabilities that TRL computes for its
    correction of vLLM's (`vllm_importance_sampling_correction`, on by default). Nothing is looked at without them, or
    where the weights are split (FSDP, ZeRO-3). `klamp.trl.GRPOTrainer` and an attached trainer look by themselves.

    Args:
        trainer: a `trl.GRPOTrainer`, built already.

    Attributes:
        sync_gap: how far off the log-probabilities were when they were last looked into, in nats per token.
        out_of_sync: whether it has warned.

    Raises:
        ConfigError: no TRL trainer.
        UnsupportedVersion: a TRL that does not keep its batch where klamp looks.
    """

    def __init__(self, trainer: trl.GRPOTrainer) -> None:
        if not isinstance(trainer, trl.GRPOTrainer):
            raise ConfigError(
                "SyncCallback takes a trl.GRPOTrainer, built already",
                got=describe(trainer),
                why="what the sampler reports is in the trainer's batches, which TRL does not hand to callbacks",
                fix="trainer.add_callback(SyncCallback(trainer)), with trainer = trl.GRPOTrainer(...)",
            )
        if not hasattr(trainer, "_buffered_inputs"):
            raise UnsupportedVersion(
                "this TRL does not keep its batch where klamp looks",
                got=f"trl {trl.__version__}, a trainer without _buffered_inputs",
                why="the sampler's log-probabilities are read from there",
                fix="use klamp.trl.GRPOTrainer, which sees them as they are made",
            )
        self.trainer: Any = trainer
        self.sync_gap, self.out_of_sync = 0.0, False
        self.batches: Any = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at a new batch before the first update that is made of it; the policy still is the one that sampled."""
        batches = self.trainer._buffered_inputs
        if not batches or batches is self.batches or hasattr(self.trainer, "_klamp"):
            return
        self.batches = batches
        found = drift(self.trainer, batches[0], self)
        if found:
            warn(found)
