"""Runs a plan from its first run to its table and picture: checks, the folder, the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from klamp.ablation.executor import Executor, Tell, Update
from klamp.ablation.outcome import Outcome, is_done, read_outcome
from klamp.ablation.pictures import write_picture
from klamp.ablation.plan import PLAN, Plan, Run, folder_name, named, plain_plan, read_plan, run_folder, runs
from klamp.ablation.table import Table, markdown, plain, summarise
from klamp.errors import KlampError, RunFolderError
from klamp.tasks.cache import Progress
from klamp.training.folders import LOCK, RUNS, free_folder, held, write_whole


def find_folder(plan: Plan, root: Path = Path("runs")) -> Path:
    """The folder below `root` that holds this plan or a part of it, else the next free one."""
    stem = f"ablation-{folder_name(plan.name)}"
    for folder in sorted(root.glob(f"{stem}-[0-9][0-9][0-9]")):
        with suppress(RunFolderError):
            if (folder / PLAN).exists():
                check_folder(plan, folder)
                return folder
    return free_folder(root, stem)


def check_folder(plan: Plan, folder: Path) -> None:
    """Refuse a folder that holds other files, or another plan than this one or a part of it; nothing is written."""
    if not (folder / PLAN).exists():
        return check_free(folder)
    old, new = plain_plan(read_plan(folder)), plain_plan(plan)
    same = (old["base"], old["kl_prompts"]) == (new["base"], new["kl_prompts"])
    if not (same and old["arms"].items() <= new["arms"].items() and {*old["seeds"]} <= {*new["seeds"]}):
        raise RunFolderError(
            "the output folder holds another ablation",
            got=str(folder / PLAN),
            why="one table would mix the runs of two plans; a plan can only get more arms and seeds",
            fix="choose another --output_dir, or repeat the command that made the folder",
        )
    return None


def check_free(folder: Path) -> None:
    """Refuse a folder that is a file, or holds files."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError("the output folder is a file", got=str(folder), fix="choose another --output_dir")
    if folder.is_dir() and any(each.name != LOCK for each in folder.iterdir()):
        raise RunFolderError(
            "the output folder holds other files",
            got=str(folder),
            why="an ablation never overwrites files",
            fix="choose another --output_dir, or leave it out",
        )


def open_folder(plan: Plan, folder: Path) -> None:
    """Make the folder and write the plan into it; arms and seeds may be added to a plan that it holds."""
    check_folder(plan, folder)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    head = "# The plan of this ablation, for `klamp ablate --plan`. The same command continues what is not done.\n"
    write_whole(folder / PLAN, head + yaml.safe_dump(plain_plan(plan), sort_keys=False, allow_unicode=True))


def load_shared(waiting: Sequence[Run], progress: Progress | None = None) -> None:
    """Make klamp's own models that are not cached, and try every task and reward once; an error names the arm."""
    from klamp.tasks import load_task
    from klamp.training.models import load_tokenizer, make_ready

    loaded: list[object] = []
    for run in waiting:
        model, task = run.config.model, run.config.task
        if (model, task) not in loaded:
            loaded.append((model, task))
            try:
                for name in filter(None, {model.model, model.ref_model}):
                    make_ready(name, progress=progress)
                load_task(task, load_tokenizer(model.tokenizer or model.model))
            except KlampError as error:
                raise named(error, f"the arm {run.arm.name!r}") from error


class Result(NamedTuple):
    """The outcomes of all runs, failed ones too, in the order of the plan; the table, and the files for people."""

    folder: Path
    outcomes: tuple[Outcome, ...]
    table: Table
    files: tuple[Path, ...]


def execute(
    plan: Plan, folder: Path, executor: Executor, *, tell: Tell = lambda update: None, progress: Progress | None = None
) -> Result:
    """Do every run that is not done yet, then write the table and the picture.

    Args:
        plan: what to run.
        folder: where; a folder with a part of this plan is continued.
        executor: runs the runs.
        tell: receives the updates of every run: first `kept` or `waiting`, then those of the executor.
        progress: follows the making of a model, before the first run.
    """
    every = runs(plan)
    check_folder(plan, folder)
    load_shared([run for run in every if not is_done(folder, run)], progress)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        open_folder(plan, folder)
        waiting = [run for run in every if not is_done(folder, run)]
        for run in every:
            steps, new = run.config.run.max_steps, run in waiting
            tell(Update(run=run.name, state="waiting" if new else "kept", step=0 if new else steps, steps=steps))
        if waiting:
            executor.run(waiting, folder, tell)
        outcomes = (read_outcome(run_folder(folder, run)) for run in every)
        return write_results([outcome for outcome in outcomes if outcome is not None], folder)


def write_results(outcomes: Sequence[Outcome], folder: Path) -> Result:
    """Write the table and the picture of the runs' outcomes into a folder."""
    table = summarise(outcomes)
    texts = {folder / "table.md": markdown(table), folder / "table.json": json.dumps(plain(table), indent=2)}
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    files = (*texts, *write_picture(outcomes, folder))
    return Result(folder=folder, outcomes=tuple(outcomes), table=table, files=files)
