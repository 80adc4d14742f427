"""One run of an ablation: train (or continue), measure, write the outcome; a program of its own."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import lock_descriptor

from klamp.ablation.executor import LOG
from klamp.ablation.measure import measure
from klamp.ablation.outcome import Outcome, failed, write_outcome
from klamp.ablation.plan import Run, read_plan, run_folder, runs
from klamp.errors import KlampError, TrainingStopped
from klamp.training.backends import train_run
from klamp.training.folders import CONFIG, METRICS_FILE, SUMMARY, lines_of, newest_policy
from klamp.training.observers import Observer

log = logging.getLogger(__name__)


def perform(run: Run, folder: Path, *observers: Observer) -> Outcome:
    """Train a run to its end (from its newest checkpoint, if it has one), measure it, and write its outcome.json.

    An error of the run is a `failed` outcome. An interrupted run raises KeyboardInterrupt or TrainingStopped; it has no
    outcome, and the next call continues it. `folder` is that of the ablation.
    """
    own = run_folder(folder, run)
    own.mkdir(parents=True, exist_ok=True)
    try:
        if (summary := finished(own, run.config.run.max_steps)) is None:
            settings = replace(run.config.run, output_dir=str(own), resume=(own / CONFIG).exists())
            summary = vars(train_run(replace(run.config, run=settings), observers))
        gc.collect()  # the optimizer and the graph are in cycles; the second model needs their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        outcome = outcome_of(run, own, summary)
    except Exception as error:
        if isinstance(error, TrainingStopped) and error.interrupted:
            raise
        log.exception("the run failed")
        text = str(error) if isinstance(error, KlampError) else f"{type(error).__name__}: {error}"
        outcome = failed(run, "\n".join((text, *getattr(error, "__notes__", ()))))
    write_outcome(own, outcome)
    return outcome


def outcome_of(run: Run, own: Path, summary: Mapping[str, Any]) -> Outcome:
    """Measure a finished run in its folder; `summary` is the content of its summary.json."""
    numbers = measure(run.config, own, prompts=run.kl_prompts)
    numbers["seconds"] = sum(row.get("speed/step_seconds", 0.0) for row in lines_of(own / METRICS_FILE))
    last = summary["final_metrics"]
    numbers |= {ours: last[name] for ours, name in (("beta", "beta"), ("price", "beta/price")) if name in last}
    scores = {name: summary[name] for name in ("rl_skill", "before", "after")}
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, numbers=numbers, **scores)


def finished(own: Path, steps: int) -> Mapping[str, Any] | None:
    """The summary of the run in a folder if its training has all its steps, else None."""
    if not (own / SUMMARY).exists() or newest_policy(own) is None:
        return None
    summary = json.loads((own / SUMMARY).read_text(encoding="utf-8"))
    return summary if summary["steps"] >= steps else None


class _Orphan(Observer):
    """Interrupts a run after a step if the command that started it has died."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the parent process."""
        if os.getppid() != self.parent:
            raise KeyboardInterrupt("the command that started the run has died")


def main(own: Path, parent: int) -> int:
    """Do the run of a folder, as the plan has it, while the process `parent` lives; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ablation = own.parent.parent
    (run,) = (run for run in runs(read_plan(ablation)) if run.name == own.name)
    with (own / LOG).open("ab") as file:
        with suppress(OSError):  # file systems without locks
            lock_descriptor(file.fileno())  # an orphan may still save its last step
        try:
            return int(perform(run, ablation, _Orphan(parent)).state == "failed")
        except (KeyboardInterrupt, TrainingStopped) as stopped:
            log.warning("%s", stopped)
            return 130


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))  # noqa: TID251  (started by klamp.ablation.local)
