"""Compares existing runs: the table and the picture that an ablation of them would have had; the runs are only read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from klamp.ablation.execute import Result, check_free, write_results
from klamp.ablation.one_run import finished, outcome_of
from klamp.ablation.plan import KL_PROMPTS, Arm, Run, check_measured, folder_name, shown
from klamp.errors import DataError
from klamp.training.config import TrainConfig
from klamp.training.folders import CONFIG, free_folder
from klamp.training.resumed import UNTIL, history_of, read, told

NO_VARIANT = (
    *("seed", "output_dir", "resume", "report_to", "eval_every", "save_every", "keep_checkpoints"),
    *("log_completions", "log_completions_every", "log_answers", "exact_kl_completions", "cpu", "stop_on"),
)
"""Fields that may differ between runs of one variant: they change what is written, not what is learned."""
SAME_TASK = ("train_size",)
"""Fields of a task that change neither the held-out prompts nor their scores."""


def as_runs(given: Sequence[tuple[Path, TrainConfig]], *, kl_prompts: int = KL_PROMPTS) -> dict[Path, Run]:
    """The runs of some folders; the fields in which they differ name their arms.

    A KlampError refuses unfinished runs, different tasks, one variant twice with the same seed, and policies that
    cannot be measured.
    """
    flat = [config.flat() for _, config in given]
    names = [name for name in flat[0] if name not in NO_VARIANT and len({repr(values[name]) for values in flat}) > 1]
    found: dict[Path, Run] = {}
    for (folder, config), values in zip(given, flat, strict=True):
        _check_task(given[0], (folder, config))
        check_measured(config, f"in {folder / CONFIG}")
        _check_finished(folder, values["max_steps"])
        own = {name: values[name] for name in names}
        moved = ("beta",) if config.kl.controller_name != "fixed" else ()  # its configured value is only the start
        words = (f"{name}{' from ' if name in moved else '='}{shown(value)}" for name, value in own.items())
        arm, seed = Arm(name=" ".join(words) or "base", values=own), config.run.seed
        run = Run(name=f"{folder_name(arm.name)}_seed-{seed}", arm=arm, seed=seed, config=config, kl_prompts=kl_prompts)
        if twice := [other for other, each in found.items() if each.name == run.name]:
            raise DataError(
                "two runs are the same variant with the same seed",
                got=f"{twice[0]} and {folder}",
                why=f"both are {arm.name!r}, seed {seed}: their numbers would count twice",
                fix="name one of them",
            )
        found[folder] = run
    return found


def compare(compared: dict[Path, Run], folder: Path, tell: Callable[[Run], None] = lambda run: None) -> Result:
    """Measure every run, which `tell` is told before, then write the table and the picture into a free folder."""
    check_free(folder)
    outcomes = []
    for own, run in compared.items():
        tell(run)
        outcomes.append(outcome_of(run, own, finished(own, run.config.run.max_steps) or {}))
    folder.mkdir(parents=True, exist_ok=True)
    return write_results(outcomes, folder)


def find_folder(compared: dict[Path, Run], root: Path = Path("runs")) -> Path:
    """The next free folder below `root` for this comparison."""
    swept = dict.fromkeys(name for run in compared.values() for name in run.arm.values)
    return free_folder(root, f"comparison-{folder_name('-'.join(swept) or 'seeds')}")


def _check_task(first: tuple[Path, TrainConfig], other: tuple[Path, TrainConfig]) -> None:
    one, another = (vars(config.task) for _, config in (first, other))
    for name in one:
        if one[name] != another[name] and name not in SAME_TASK:
            raise DataError(
                "these runs cannot be compared: they had different tasks",
                got=f"{name} is {shown(one[name])!r} in {first[0]} and {shown(another[name])!r} in {other[0]}",
                why="their scores are of different prompts or rewards, and one table would mix them",
                fix="name runs of one task, or score each with klamp evaluate --checkpoint FOLDER --task NAME",
            )


def _check_finished(folder: Path, steps: int) -> None:
    """Refuse a run that is not complete, or whose recipe a resume changed."""
    try:
        why = "" if finished(folder, steps) else f"it has no checkpoint, or no summary of {steps} steps"
    except (ValueError, TypeError, LookupError, OSError) as error:
        why = f"its summary is damaged: {type(error).__name__}: {error}"
    if why:
        raise DataError("a run is not finished", got=str(folder), why=why, fix=f"klamp train --resume {folder}")
    values = read(folder)
    if any(entry.keys() - {*NO_VARIANT, "max_steps", UNTIL} for entry in history_of(values)):
        raise DataError(
            "a run had no single recipe",
            got="; ".join(f"{folder} after step {step}: {text}" for step, text in told(values).items()),
            why="a resume changed its training, and a row of the table stands for one variant",
            fix="leave it out, or train that variant from the start",
        )
