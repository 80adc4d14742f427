"""What is checked and prepared once before the runs of an ablation start: the folder, the base model, the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from klamp.ablation.outcome import read_outcome
from klamp.ablation.plan import Plan, Run, folder_name, named, plain_plan, plan_of, run_folder, runs
from klamp.errors import KlampError, RunFolderError
from klamp.tasks.cache import Progress
from klamp.tasks.files import yaml_of
from klamp.training.folders import RUNS, free_folder
from klamp.training.lock import LOCK
from klamp.training.whole_files import write_whole

PLAN = "plan.yaml"
HEADER = (
    "# The plan of this ablation; `klamp ablate --plan` reads it. The same command again continues what is not done.\n"
)


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


def read_plan(folder: Path) -> Plan:
    """The plan that a folder was made with.

    Raises:
        RunFolderError: its file is damaged, or this version of klamp refuses what it says.
    """
    file = folder / PLAN
    try:
        plan = plan_of(yaml_of(file.read_text(encoding="utf-8")))
        runs(plan)
        return plan
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunFolderError(
            "the plan in the ablation's folder cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="choose another --output_dir",
        ) from error


def check_folder(plan: Plan, folder: Path) -> None:
    """Refuse a folder that holds another plan than this one or the beginning of it; nothing is written.

    Raises:
        RunFolderError: another ablation, or other files.
    """
    if folder.exists() and not folder.is_dir():
        raise RunFolderError("the output folder is a file", got=str(folder), fix="choose another --output_dir")
    if (folder / PLAN).exists():
        found = difference(read_plan(folder), plan)
        if found:
            raise RunFolderError(
                "the output folder holds another ablation",
                got=f"{folder / PLAN}: {found}",
                why="one table would mix the runs of two plans; only arms and seeds may be added",
                fix="choose another --output_dir, or repeat the command that made the folder",
            )
    elif folder.is_dir() and any(each.name != LOCK for each in folder.iterdir()):
        raise RunFolderError(
            "the output folder holds other files",
            got=str(folder),
            why="an ablation never writes over what is there",
            fix="choose another --output_dir",
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
    text = HEADER + yaml.safe_dump(plain_plan(plan), sort_keys=False, allow_unicode=True)
    write_whole(folder / PLAN, text)


def is_done(folder: Path, run: Run) -> bool:
    """Whether the run is done; a failed run is not, and is tried again.

    Args:
        folder: of the ablation.
        run: one of its runs.
    """
    outcome = read_outcome(run_folder(folder, run))
    return outcome is not None and outcome.state == "done"


def check_references(every: Sequence[Run]) -> None:
    """Refuse references that do not fit their model, before anything is loaded.

    Raises:
        ConfigError: with the name of the arm.
    """
    from klamp.training.setup import reference_kind

    for run in every:
        try:
            reference_kind(run.config)
        except KlampError as error:
            raise named(error, f"the arm {run.arm.name!r}") from error


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
                make_ready(name, progress=progress, task=task.task)
            load_task(task, load_tokenizer(model.tokenizer or model.model, task=task.task))
        except KlampError as error:
            raise named(error, f"the arm {run.arm.name!r}") from error
