"""Compares runs that are there already: the table and the pictures that an ablation of them would have had.

The folder of a comparison is that of an ablation: `runs/NAME/` has the small files of each run and its outcome.json, so
that reports are made from it as usual. The runs themselves are read, and nothing is written into their folders.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from klamp.ablation.execute import Result, check_free, write_results
from klamp.ablation.one_run import finished, outcome_of
from klamp.ablation.outcome import KEPT, write_outcome
from klamp.ablation.plan import KL_PROMPTS, Arm, Run, check_measured, folder_name, run_folder, shown
from klamp.errors import DataError
from klamp.training.config import TrainConfig
from klamp.training.folders import CONFIG, RUNS, free_folder, held
from klamp.training.resumed import UNTIL, history_of, read, told

NO_VARIANT = (
    *("seed", "output_dir", "resume", "report_to", "eval_every", "save_every", "keep_checkpoints"),
    *("log_completions", "log_completions_every", "log_answers", "exact_kl_completions", "cpu", "stop_on"),
    *("process_timeout", "service_timeout", "stall_timeout"),
)
"""Fields in which runs may differ and be the same variant: they change what is written, not what is learnt."""
SAME_TASK = ("train_size", "reward_timeout")
"""Fields of a task in which it may differ and still ask and score the same held-out prompts."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One of the runs that are compared."""

    run: Run
    """The run as an ablation would have it: its arm is what sets it apart from the others."""
    folder: Path
    """Its own folder."""


def as_runs(given: Sequence[tuple[Path, TrainConfig]], *, kl_prompts: int = KL_PROMPTS) -> tuple[Compared, ...]:
    """The runs of some folders, their arms named by the fields in which they differ.

    Args:
        given: folder and configuration of each run.
        kl_prompts: held-out prompts, at most, that the KL is measured on.

    Raises:
        DataError: one that is not over; two that had not the same task, or are the same variant with the same seed.
        ConfigError: one whose policy cannot be measured.
    """
    flat = [config.flat() for _, config in given]
    for (folder, config), values in zip(given, flat, strict=True):
        _check_task(given[0], (folder, config))
        check_measured(config, f"in {folder / CONFIG}")
        _check_finished(folder, values["max_steps"])
        _check_recipe(folder)
    names = [name for name in flat[0] if name not in NO_VARIANT and len({repr(values[name]) for values in flat}) > 1]
    found: list[Compared] = []
    for (folder, config), values in zip(given, flat, strict=True):
        own = {name: values[name] for name in names}
        moved = ("beta",) if config.kl.controller_name != "fixed" else ()  # only where it started is configured
        words = (f"{name}{' from ' if name in moved else '='}{shown(value)}" for name, value in own.items())
        arm = Arm(name=" ".join(words) or "base", values=own)
        seed = config.run.seed
        run = Run(name=f"{folder_name(arm.name)}_seed-{seed}", arm=arm, seed=seed, config=config, kl_prompts=kl_prompts)
        found.append(Compared(run=run, folder=folder))
    _refuse_twice(found)
    return tuple(found)


def compare(compared: Sequence[Compared], folder: Path, told: Callable[[Run], None] = lambda run: None) -> Result:
    """Measure every run, then write the table and the pictures.

    Args:
        compared: see `as_runs`.
        folder: where; it is free.
        told: told of each run before it is measured.

    Raises:
        RunFolderError: the folder holds something.
        KlampError: a model or a task that cannot be loaded.
    """
    check_free(folder)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        for each in compared:
            told(each.run)
            _measure(each, run_folder(folder, each.run))
        return write_results([each.run for each in compared], folder)


def find_folder(compared: Sequence[Compared], root: Path = Path("runs")) -> Path:
    """The next free folder below `root` for this comparison."""
    swept = dict.fromkeys(name for each in compared for name in each.run.arm.values)
    return free_folder(root, f"comparison-{folder_name('-'.join(swept) or 'seeds')}")


def _measure(each: Compared, own: Path) -> None:
    summary = finished(each.folder, each.run.config.run.max_steps)
    assert summary is not None, "it was checked"
    outcome = outcome_of(each.run, each.folder, summary)
    own.mkdir(exist_ok=True)
    for name in KEPT:
        if (each.folder / name).is_file():
            shutil.copyfile(each.folder / name, own / name)
    write_outcome(own, outcome)


def _check_task(first: tuple[Path, TrainConfig], other: tuple[Path, TrainConfig]) -> None:
    one, another = (vars(config.task) for _, config in (first, other))
    for name in one:
        if one[name] != another[name] and name not in SAME_TASK:
            raise DataError(
                "these runs cannot be compared: they had not the same task",
                got=f"{name} is {shown(one[name])!r} in {first[0]} and {shown(another[name])!r} in {other[0]}",
                why="their scores are of different prompts or rewards, and one table would mix them",
                fix="name runs of one task, or score each with klamp evaluate --checkpoint FOLDER --task NAME",
            )


def _check_finished(folder: Path, steps: int) -> None:
    try:
        summary, why = finished(folder, steps), f"it has no checkpoint, or no summary of {steps} steps"
    except (ValueError, TypeError, LookupError, OSError) as error:
        summary, why = None, f"its summary is damaged: {type(error).__name__}: {error}"
    if summary is None:
        raise DataError(
            "a run is not finished",
            got=str(folder),
            why=why,
            fix=f"finish it: klamp train --resume {folder}",
        )


def _check_recipe(folder: Path) -> None:
    values = read(folder)
    learnt = [entry.keys() - {*NO_VARIANT, "max_steps", UNTIL} for entry in history_of(values)]
    if any(learnt):
        raise DataError(
            "a run had no single recipe",
            got="; ".join(f"{folder} after step {step}: {text}" for step, text in told(values).items()),
            why="a resume changed what it learns by, and a row of the table stands for one variant",
            fix="leave it out, or train that variant from the start",
        )


def _refuse_twice(found: Sequence[Compared]) -> None:
    for one, other in itertools.combinations(found, 2):
        if one.run.name == other.run.name:
            raise DataError(
                "two runs are the same variant with the same seed",
                got=f"{one.folder} and {other.folder}",
                why=f"both are {one.run.arm.name!r}, seed {one.run.seed}: their numbers would count twice",
                fix="name one of them",
            )
