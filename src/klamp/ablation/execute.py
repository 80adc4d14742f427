"""Runs a plan from its first run to its table and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klamp.ablation.answers import write_answers
from klamp.ablation.checks import (
    check_folder,
    check_references,
    is_done,
    load_shared,
    open_folder,
)
from klamp.ablation.executor import Executor, Tell, Update
from klamp.ablation.outcome import Outcome, read_outcome
from klamp.ablation.pictures import NOT_DRAWN, write_pictures
from klamp.ablation.plan import Plan, Run, run_folder, runs
from klamp.ablation.table import Table, markdown, plain, summarise
from klamp.ablation.table_files import CSV, csv_text
from klamp.tasks.cache import Progress
from klamp.training.lock import held

TABLE_MARKDOWN, TABLE_JSON = "table.md", "table.json"


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
    not_drawn: Mapping[str, str]
    """A picture that there is no data for -> why."""

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
    check_references(every)
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
        TABLE_MARKDOWN: markdown(table),
        TABLE_JSON: json.dumps(plain(table), indent=2),
        CSV: csv_text(table),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    pictures = write_pictures(outcomes, folder)
    files = (*(folder / name for name in texts), *write_answers(every, folder), *pictures)
    drawn = {file.name for file in pictures}
    missing = {name: why for name, why in NOT_DRAWN.items() if name not in drawn}
    return Result(folder=folder, outcomes=outcomes, table=table, files=files, not_drawn=missing)


def _first_update(run: Run, folder: Path) -> Update:
    """The state of a run before anything is started: done, to be continued, or new."""
    steps, outcome = run.config.run.max_steps, read_outcome(run_folder(folder, run))
    if outcome is not None and outcome.state == "done":
        return Update(run=run.name, state="kept", step=steps, steps=steps, metrics=outcome.numbers)
    return Update(run=run.name, state="waiting", steps=steps)
