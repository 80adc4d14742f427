"""Runs a plan from its first run to its table and pictures: the folder, what is checked before, what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from klamp.ablation.executor import Executor, Tell, Update
from klamp.ablation.outcome import Outcome, is_done, read_outcome
from klamp.ablation.pictures import write_pictures
from klamp.ablation.plan import PLAN, Plan, Run, folder_name, named, plain_plan, read_plan, run_folder, runs
from klamp.ablation.table import Table, markdown, plain, summarise
from klamp.errors import KlampError, RunFolderError
from klamp.tasks.cache import Progress
from klamp.training.folders import LOCK, RUNS, free_folder, held, write_whole


def find_folder(plan: Plan, root: Path = Path("runs")) -> Path:
    """The folder of this plan below `root`: the one that holds it already, or a part of it; else the next free one.

    So the same command, given again without a folder, goes on where it stopped.
    """
    stem = f"ablation-{folder_name(plan.name)}"
    for folder in sorted(root.glob(f"{stem}-[0-9][0-9][0-9]")):
        with suppress(RunFolderError):  # a damaged plan is not this one
            if (folder / PLAN).exists() and not difference(read_plan(folder), plan):
                return folder
    return free_folder(root, stem)


def check_folder(plan: Plan, folder: Path) -> None:
    """Refuse a folder that holds another plan than this one or the beginning of it; nothing is written.

    Raises:
        RunFolderError: another ablation, or other files.
    """
    if not (folder / PLAN).exists():
        check_free(folder)
    elif found := difference(read_plan(folder), plan):
        raise RunFolderError(
            "the output folder holds another ablation",
            got=f"{folder / PLAN}: {found}",
            why="one table would mix the runs of two plans; only arms and seeds may be added",
            fix="choose another --output_dir, or repeat the command that made the folder",
        )


def check_free(folder: Path) -> None:
    """Refuse a folder that is a file, or holds files.

    Raises:
        RunFolderError: it is, or does.
    """
    if folder.exists() and not folder.is_dir():
        raise RunFolderError("the output folder is a file", got=str(folder), fix="choose another --output_dir")
    if folder.is_dir() and any(each.name != LOCK for each in folder.iterdir()):
        raise RunFolderError(
            "the output folder holds other files",
            got=str(folder),
            why="an ablation never writes over what is there",
            fix="choose another --output_dir, or leave it out",
        )


def difference(held: Plan, asked: Plan) -> str:
    """Why this plan cannot continue the plan that a folder holds, in words; "" where it can."""
    before, after = ({run.name: run for run in runs(plan)} for plan in (held, asked))
    if held.kl_prompts != asked.kl_prompts:
        return f"kl_prompts is {held.kl_prompts} there, {asked.kl_prompts} here"
    for name, run in before.items():
        if name not in after:
            return f"its run {name} is not part of this plan"
        old, new = run.config.flat(), after[name].config.flat()
        changed = sorted(field for field in old if old[field] != new[field])
        if changed:
            return f"{changed[0]} of the arm {run.arm.name!r} is {old[changed[0]]!r} there, {new[changed[0]]!r} here"
    return ""


def open_folder(plan: Plan, folder: Path) -> None:
    """Make the folder and write the plan into it, or add new arms and seeds to the plan that it holds.

    Raises:
        RunFolderError: see `check_folder`.
    """
    check_folder(plan, folder)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    head = "# The plan of this ablation, for `klamp ablate --plan`. The same command goes on with what is not done.\n"
    write_whole(folder / PLAN, head + yaml.safe_dump(plain_plan(plan), sort_keys=False, allow_unicode=True))


def load_shared(waiting: Sequence[Run], progress: Progress | None = None) -> None:
    """Load what runs share: make models of klamp's own that are not cached, and try every task and reward once.

    Args:
        waiting: the runs that are not done.
        progress: told how far a model is that has to be made.

    Raises:
        KlampError: a tokenizer, task or reward that cannot be used, with the name of the arm.
    """
    from klamp.tasks import load_task
    from klamp.training.models import load_tokenizer, make_ready

    seen: list[Any] = []
    for run in waiting:
        model, task = run.config.model, run.config.task
        inputs = (model.model, model.ref_model, model.tokenizer, task)
        if inputs in seen:
            continue
        seen.append(inputs)
        try:
            for name in filter(None, {model.model, model.ref_model}):
                make_ready(name, progress=progress)
            load_task(task, load_tokenizer(model.tokenizer or model.model))
        except KlampError as error:
            raise named(error, f"the arm {run.arm.name!r}") from error


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an ablation came to: outcomes, table and files."""

    folder: Path
    """The folder of the ablation."""
    outcomes: tuple[Outcome, ...]
    """The outcomes of all runs, failed ones too, in the order of the plan."""
    table: Table
    """The table over the seeds of every arm."""
    files: tuple[Path, ...]
    """The files that were written for people: the table and the pictures."""

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The runs that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "failed")


def execute(
    plan: Plan,
    folder: Path,
    executor: Executor,
    *,
    tell: Tell = lambda update: None,
    progress: Progress | None = None,
) -> Result:
    """Do every run that is not done yet, then write the table and the pictures.

    Args:
        plan: what to run.
        folder: where; one that holds the beginning of this plan is continued.
        executor: who runs the runs.
        tell: told what becomes of every run: first `kept` or `waiting` for each, then what the executor says.
        progress: told before that how far a model is that has to be made.

    Returns:
        What it came to; runs that failed are among its outcomes.

    Raises:
        ConfigError: a configuration that is refused, before anything starts, with the name of its arm.
        RunFolderError: the folder holds something else, or another process works in it.
        KlampError: a task, reward or tokenizer that cannot be used, before any run starts.
        TrainingStopped: Ctrl-C; the same call goes on where the runs stopped.
    """
    every = runs(plan)
    check_folder(plan, folder)
    load_shared([run for run in every if not is_done(folder, run)], progress)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        open_folder(plan, folder)
        waiting = [run for run in every if not is_done(folder, run)]
        for run in every:
            tell(_first_update(run, folder))
        if waiting:
            executor.run(waiting, folder, tell)
        return write_results(every, folder)


def write_results(every: Sequence[Run], folder: Path) -> Result:
    """Write the table and the pictures of the runs' outcomes.

    Args:
        every: the runs of the plan.
        folder: of the ablation.
    """
    found = [read_outcome(run_folder(folder, run)) for run in every]
    outcomes = tuple(outcome for outcome in found if outcome is not None)
    table = summarise(outcomes)
    texts = {
        "table.md": markdown(table),
        "table.json": json.dumps(plain(table), indent=2),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = (*(folder / name for name in texts), *write_pictures(outcomes, folder))
    return Result(folder=folder, outcomes=outcomes, table=table, files=files)


def _first_update(run: Run, folder: Path) -> Update:
    """The state of a run before anything is started: done, to be continued, or new."""
    steps, outcome = run.config.run.max_steps, read_outcome(run_folder(folder, run))
    if outcome is not None and outcome.state == "done":
        return Update(run=run.name, state="kept", step=steps, steps=steps, metrics=outcome.numbers)
    return Update(run=run.name, state="waiting", steps=steps)
