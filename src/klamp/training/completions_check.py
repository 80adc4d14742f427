"""Checks the completions that a run kept against the weights that wrote them, where those are still there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klamp.diagnostics.sync import SyncReport
from klamp.errors import DataError
from klamp.hosts.common.sampler_weights import check_sync
from klamp.training.config import TrainConfig
from klamp.training.folders import COMPLETIONS, POLICY, checkpoint_folders, lines_of, number_of
from klamp.training.models import load_model, load_tokenizer, with_adapter

ROWS = 8
"""Completions of a step that are scored again."""


def check_run(config: TrainConfig, folder: Path) -> Iterator[tuple[int, SyncReport]]:
    """What sampler and trainer reported, at each step whose weights are at hand: (step, report), the first step first.

    The first step's weights are those of the model that the run started from; those of step N + 1 are in the checkpoint
    of step N.

    Args:
        config: of the run.
        folder: its folder.

    Raises:
        DataError: the run kept no completions of such a step, or none with a sampler's log-probabilities.
        ModelError: weights cannot be loaded.
    """
    kept = _by_step(folder / COMPLETIONS)
    weights = {1: None, **{_steps_before(saved, config) + 1: saved for saved in checkpoint_folders(folder)}}
    steps = sorted(weights.keys() & kept.keys())
    if not steps:
        raise DataError(
            "no completions can be scored again",
            got=f"completions of steps {sorted(kept) or 'none'}, weights of steps {sorted(weights)}",
            why="a step's weights are those before it: the model of the start, or the checkpoint of the step before",
            fix="set log_completions_every=1; where transformers generates for TRL, a sampler tells nothing",
        )
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    start = load_model(config.model.model, config.model.dtype)
    for step in steps:
        saved, rows = weights[step], kept[step]
        moved = saved is not None and not config.model.lora_r  # with an adapter, the start is the policy without it
        yield (
            step,
            check_sync(
                start if saved is None else _policy(config, saved),
                [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows],  # pyright: ignore
                [tokenizer.convert_tokens_to_ids(row["tokens"]) for row in rows],  # pyright: ignore
                [row["sampler_logprobs"] for row in rows],
                trainer_logprobs=[row["policy_logprobs"] for row in rows],
                temperature=config.rollout.temperature,
                top_k=config.rollout.top_k,
                top_p=config.rollout.top_p,
                start=start if moved else None,
            ),
        )


def _policy(config: TrainConfig, checkpoint: Path) -> Any:
    """The policy of a checkpoint."""
    model, inside = config.model, checkpoint / POLICY
    saved = inside if inside.is_dir() else checkpoint
    if model.lora_r:
        return with_adapter(load_model(model.model, model.dtype), model, saved).eval()
    return load_model(str(saved), model.dtype)


def _by_step(file: Path) -> dict[int, list[dict[str, Any]]]:
    """The first completions of each step that have the log-probabilities of a sampler."""
    kept: dict[int, list[dict[str, Any]]] = {}
    for row in lines_of(file):
        told = [value for value in row.get("sampler_logprobs") or () if value is not None and math.isfinite(value)]
        rows = kept.setdefault(int(row["step"]), []) if told else []
        if len(rows) < ROWS:
            rows.append(row)
    return kept


def _steps_before(checkpoint: Path, config: TrainConfig) -> int:
    """The steps that were done when a checkpoint was written; TRL counts updates."""
    updates = config.optim.num_iterations if checkpoint.name.startswith("checkpoint-") else 1
    return number_of(checkpoint) // updates
