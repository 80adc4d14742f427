"""Whether the engine that samples for TRL has the policy's weights: looked at when its log-probabilities drift off."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from klamp.diagnostics.sync import SAME, SyncReport
from klamp.errors import KLWarning
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


def watch(trainer: Any, output: Any) -> None:
    """Warn once, with the likely cause, where the sampler's log-probabilities are not those of the policy.

    Args:
        trainer: klamp's, whose policy it is; its weights are those that the completions were sampled with.
        output: the generation batch; nothing happens where the sampler tells no log-probabilities.
    """
    session = trainer._klamp
    told, own = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
    if told is None or own is None or session.out_of_sync or weights_are_split(trainer):
        return
    mask = loss_mask(output) & told.isfinite()
    gap = float((told - own)[mask].abs().mean()) if bool(mask.any()) else 0.0
    if gap <= max(SAME.value, FURTHER * session.sync_gap):
        return
    session.sync_gap = gap
    report = look(trainer, output)
    session.out_of_sync = not report.in_sync
    if session.out_of_sync:
        trainer._caution(f"sampler and trainer are out of sync at step {trainer.state.global_step + 1}: {report}")


def look(trainer: Any, output: Any) -> SyncReport:
    """Score some completions of a generation batch again, and say whose log-probabilities were reported."""
    mask = loss_mask(output)
    told = output["sampling_per_token_logps"].masked_fill(~mask, torch.nan)
    own = output["old_per_token_logps"].masked_fill(~mask, torch.nan)
    written = output["completion_mask"].bool()
    rows = range(min(ROWS, len(written)))
    args, start = trainer.args, trainer.ref_model
    if start is None or args.sync_ref_model or not trainer._klamp.starts_at_reference or not trainer.state.global_step:
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
