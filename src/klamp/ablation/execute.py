"""Runs a plan from its first run to its table and picture: the folder, the runs, the files."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import yaml

from klamp.ablation.outcome import OUTCOME, Outcome, failed, is_done, read_outcome, write_outcome
from klamp.ablation.plan import Plan, Run, plain_plan, run_folder, runs
from klamp.ablation.results import Result, write_results
from klamp.errors import KlampError, RunFolderError, TrainingStopped
from klamp.files import yaml_of
from klamp.tasks.cache import Progress
from klamp.training.folders import LOCK, held, write_whole

PLAN, LOG = "plan.yaml", "log.txt"
"""The file of the plan in an ablation's folder, and the one in a run's folder with the output of its process."""
MOMENT = 0.1
"""Seconds between two looks at the runs."""
Tell: TypeAlias = Callable[[Run, Outcome | None], None]
"""Receives every run when it starts (None), and when it has ended or was done before."""


class Executor(Protocol):
    """Runs the runs of a plan; a subclass starts, watches and stops the job of one run."""

    at_once: int
    """Jobs at a time."""

    def describe(self) -> str: ...  # where the runs execute, in words
    def start(self, run: Run, folder: Path) -> Any: ...  # returns the job of a run, whose folder exists
    def ended(self, job: Any) -> str | None: ...  # how a job ended, in words; None while it runs
    def stop(self, job: Any, *, kill: bool) -> None: ...  # asks a job to save its state and end, or kills it

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; each leaves an outcome.json in its folder.

        A run that fails, or whose process dies, is recorded as failed; the others continue. Ctrl-C raises
        TrainingStopped, from KeyboardInterrupt, after the runs under way have saved their state.
        """
        from klamp.training.interrupts import deferred_interrupts

        waiting, jobs, stopping = deque(runs), dict[str, tuple[Run, Any]](), False
        try:
            with deferred_interrupts() as interrupt:
                while jobs or (waiting and not interrupt.asked):
                    while waiting and len(jobs) < self.at_once and not interrupt.asked:
                        run = waiting.popleft()
                        own = run_folder(folder, run)
                        own.mkdir(parents=True, exist_ok=True)
                        (own / OUTCOME).unlink(missing_ok=True)
                        jobs[run.name] = run, self.start(run, folder)
                        tell(run, None)
                    if interrupt.asked and not stopping:
                        stopping = True
                        for _, job in jobs.values():
                            self.stop(job, kill=False)
                    time.sleep(MOMENT)
                    for name, (run, job) in list(jobs.items()):
                        if (how := self.ended(job)) is not None:
                            del jobs[name]
                            if outcome := _outcome(run, run_folder(folder, run), "" if stopping else how):
                                tell(run, outcome)
        except KeyboardInterrupt:  # the second Ctrl-C
            stopping = True
        finally:
            for _, job in jobs.values():
                self.stop(job, kill=True)
        if stopping:
            raise TrainingStopped(
                "the ablation was stopped",
                got="an interrupt",
                why="the runs under way saved their last completed step",
                fix="repeat the command with the same --output_dir: it continues them",
            ) from KeyboardInterrupt()


def _outcome(run: Run, own: Path, how: str) -> Outcome | None:
    """The outcome of a run that ended; without an outcome it failed, unless it was interrupted (`how` is "")."""
    outcome = read_outcome(own)
    if outcome is None and how:
        outcome = failed(run, how)
        write_outcome(own, outcome)
    return outcome


def check_folder(plan: Plan, folder: Path) -> None:
    """Refuse a folder that holds other files, or another plan; nothing is written."""
    if not (folder / PLAN).exists():
        return check_free(folder)
    try:
        same = yaml_of((folder / PLAN).read_text(encoding="utf-8")) == yaml_of(_text(plan))
    except ValueError:  # damaged
        same = False
    if not same:
        raise RunFolderError(
            "the output folder holds another ablation",
            got=str(folder / PLAN),
            why="one table would mix the runs of two plans",
            fix="choose another --output_dir, or repeat the command that made the folder",
        )
    return None


def check_free(folder: Path) -> None:
    """Refuse a folder that is a file, or holds files."""
    if folder.exists() and not (folder.is_dir() and {each.name for each in folder.iterdir()} <= {LOCK}):
        raise RunFolderError(
            "the output folder is not empty",
            got=str(folder),
            why="an ablation never overwrites files",
            fix="choose another --output_dir, or leave it out",
        )


def open_folder(plan: Plan, folder: Path) -> None:
    """Make the folder and write the plan into it."""
    check_folder(plan, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PLAN, _text(plan))


def _text(plan: Plan) -> str:
    return yaml.safe_dump(plain_plan(plan), sort_keys=False, allow_unicode=True)


def load_shared(every: Sequence[Run], progress: Progress | None = None) -> None:
    """Make klamp's own models that are not cached, and open every task and reward once; an error names the arm."""
    from klamp.training.models import make_ready
    from klamp.training.setup import open_inputs

    for run in {(run.config.model, run.config.task): run for run in every}.values():
        try:
            for name in filter(None, {run.config.model.model, run.config.model.ref_model}):
                make_ready(name, progress=progress)
            open_inputs(run.config)
        except KlampError as error:
            error.add_note(f"in the arm {run.arm.name!r}")
            raise


def execute(
    plan: Plan, folder: Path, executor: Executor, *, tell: Tell = lambda *_: None, progress: Progress | None = None
) -> Result:
    """Do every run that is not done yet, then write the table and the picture; a folder with this plan is continued.

    `tell` receives the runs that are done already, then those of the executor; `progress` follows a model that is made.
    """
    every = runs(plan)
    check_folder(plan, folder)
    load_shared(every, progress)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        open_folder(plan, folder)
        waiting = [run for run in every if not is_done(folder, run)]
        for run in every:
            if run not in waiting:
                tell(run, read_outcome(run_folder(folder, run)))
        executor.run(waiting, folder, tell)
        outcomes = (read_outcome(run_folder(folder, run)) for run in every)
        return write_results([outcome for outcome in outcomes if outcome is not None], folder)
