"""Compares existing runs: the table and the picture that an ablation of them would have had; the runs are only read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from klamp.ablation.execute import check_free
from klamp.ablation.one_run import finished, outcome_of
from klamp.ablation.plan import KL_PROMPTS, Arm, Run, run_of, shown
from klamp.ablation.results import Result, write_results
from klamp.errors import DataError
from klamp.training.config import TrainConfig

NO_VARIANT = (
    *("seed", "output_dir", "resume", "report_to", "eval_every", "save_every", "keep_checkpoints"),
    *("log_completions", "log_completions_every", "log_answers", "exact_kl_completions", "cpu", "stop_on"),
)
"""Fields that may differ between runs of one variant: they change what is written, not what is learned."""
SAME_TASK = ("train_size",)
"""Fields of a task that change neither the held-out prompts nor their scores."""


def as_runs(given: Sequence[tuple[Path, TrainConfig]], *, kl_prompts: int = KL_PROMPTS) -> dict[Path, Run]:
    """The runs of some folders; the fields in which they differ name their arms.

    A DataError refuses unfinished runs, different tasks, and one variant twice with the same seed.
    """
    flat = [config.flat() for _, config in given]
    names = [name for name in flat[0] if name not in NO_VARIANT and len({repr(values[name]) for values in flat}) > 1]
    found: dict[str, tuple[Path, Run]] = {}
    for (folder, config), values in zip(given, flat, strict=True):
        _check_task(given[0], (folder, config))
        _check_finished(folder, values["max_steps"])
        own = {name: values[name] for name in names}
        moved = ("beta",) if config.kl.controller_name != "fixed" else ()  # its configured value is only the start
        words = (f"{name}{' from ' if name in moved else '='}{shown(value)}" for name, value in own.items())
        arm = Arm(name=" ".join(words) or "base", values=own)
        run = run_of(arm, config.run.seed, config, kl_prompts)
        if run.name in found:
            raise DataError(
                "two runs are the same variant with the same seed",
                got=f"{found[run.name][0]} and {folder}",
                why=f"both are {run.name}: their numbers would count twice",
                fix="name one of them",
            )
        found[run.name] = folder, run
    return dict(found.values())


def compare(compared: dict[Path, Run], folder: Path, tell: Callable[[Run], None] = lambda run: None) -> Result:
    """Measure every run, which `tell` is told before, then write the table and the picture into a free folder."""
    check_free(folder)
    outcomes = []
    for own, run in compared.items():
        tell(run)
        outcomes.append(outcome_of(run, own, finished(own, run.config.run.max_steps) or {}))
    folder.mkdir(parents=True, exist_ok=True)
    return write_results(outcomes, folder)


def _check_task(first: tuple[Path, TrainConfig], other: tuple[Path, TrainConfig]) -> None:
    one, another = (vars(config.task) for _, config in (first, other))
    for name in one:
        if one[name] != another[name] and name not in SAME_TASK:
            raise DataError(
                "these runs had different tasks",
                got=f"{name} is {shown(one[name])!r} in {first[0]} and {shown(another[name])!r} in {other[0]}",
                why="their scores are of different prompts or rewards",
                fix="name runs of one task, or score each with klamp evaluate --checkpoint FOLDER --task NAME",
            )


def _check_finished(folder: Path, steps: int) -> None:
    """Refuse a run that is not complete."""
    with suppress(ValueError, TypeError, LookupError):  # a damaged summary
        if finished(folder, steps):
            return
    why, fix = f"it has no checkpoint, or no summary of {steps} steps", f"klamp train --resume {folder}"
    raise DataError("a run is not finished", got=str(folder), why=why, fix=fix)
