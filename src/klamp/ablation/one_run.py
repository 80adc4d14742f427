"""One run of an ablation: train (or continue), measure, write the outcome."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from klamp.ablation.executor import RunState, Tell, Update
from klamp.ablation.measure import measure
from klamp.ablation.outcome import Outcome, failed, write_outcome
from klamp.ablation.plan import Run, run_folder
from klamp.diagnostics.doctor import Finding
from klamp.errors import KlampError, TrainingStopped
from klamp.training.backends import train_run
from klamp.training.folders import CONFIG, METRICS_FILE, SUMMARY, lines_of, newest_policy
from klamp.training.observers import Observer, RunInfo

log = logging.getLogger(__name__)

LAST = {"beta": "beta", "price": "beta/price"}
"""Number of an outcome -> the metric of the last step that it is."""
TOLD = ("reward", "kl/exact", "kl/k3", "length/mean", "beta")
"""The metrics of a step that are reported."""


def perform(run: Run, folder: Path, report: Tell) -> Outcome:
    """Train a run to its end (from its newest checkpoint, if it has one), measure it, and write its outcome.json.

    Args:
        run: what to train; its folder is `run_folder(folder, run)`.
        folder: of the ablation.
        report: told after every step, and at last that the run is done or has failed.

    Returns:
        The outcome; `failed` with the reason for whatever the run itself raised.

    Raises:
        KeyboardInterrupt, TrainingStopped: it was interrupted; there is no outcome, and the next call goes on.
    """
    own = run_folder(folder, run)
    own.mkdir(parents=True, exist_ok=True)
    told = _Told(run, report)
    try:
        if (summary := finished(own, run.config.run.max_steps)) is None:
            settings = replace(run.config.run, output_dir=str(own), resume=(own / CONFIG).exists())
            summary = vars(train_run(replace(run.config, run=settings), [told]))
        gc.collect()  # the optimizer and the graph are in cycles; the second model needs their room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        outcome = outcome_of(run, own, summary, lambda: told.tell("measuring"))
    except Exception as error:
        if isinstance(error, TrainingStopped) and error.interrupted:
            raise
        log.exception("the run failed")
        text = str(error) if isinstance(error, KlampError) else f"{type(error).__name__}: {error}"
        outcome = failed(run, "\n".join((text, *getattr(error, "__notes__", ()))))
    write_outcome(own, outcome)
    told.tell(outcome.state, metrics=outcome.numbers, text=outcome.error.partition("\n")[0])
    return outcome


def outcome_of(
    run: Run, own: Path, summary: Mapping[str, Any], measuring: Callable[[], None] = lambda: None
) -> Outcome:
    """Measure a run that is over.

    Args:
        run: the run.
        own: its folder.
        summary: what its training came to, as in its summary.json.
        measuring: called between batches; may raise to stop.
    """
    numbers = measure(run.config, own, measuring, prompts=run.kl_prompts)
    numbers["seconds"] = sum(row.get("speed/step_seconds", 0.0) for row in lines_of(own / METRICS_FILE))
    numbers |= {ours: summary["final_metrics"][name] for ours, name in LAST.items() if name in summary["final_metrics"]}
    return Outcome(
        run=run.name,
        arm=run.arm.name,
        seed=run.seed,
        values=run.arm.values,
        rl_skill=summary["rl_skill"],
        before=summary["before"],
        after=summary["after"],
        numbers=numbers,
    )


def finished(own: Path, steps: int) -> Mapping[str, Any] | None:
    """The summary of a run whose training is over; None where it is not.

    Args:
        own: folder of the run.
        steps: how many it was to take.
    """
    if not (own / SUMMARY).exists() or newest_policy(own) is None:
        return None
    summary = json.loads((own / SUMMARY).read_text(encoding="utf-8"))
    return summary if summary["steps"] >= steps else None


class _Told(Observer):
    """An observer of the trainer that reports the steps of a run as updates."""

    def __init__(self, run: Run, report: Tell) -> None:
        self.run, self.report, self.step = run, report, 0

    def tell(self, state: RunState, *, metrics: Mapping[str, float] | None = None, text: str = "") -> None:
        """Report an update."""
        steps = self.run.config.run.max_steps
        step = steps if state in ("measuring", "done") else self.step
        self.report(Update(run=self.run.name, state=state, step=step, steps=steps, metrics=metrics or {}, text=text))

    def on_start(self, info: RunInfo) -> None:
        """Report that the run begins or continues."""
        self.step = info.start_step
        self.tell("running")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step."""
        self.step = step
        self.tell("running", metrics={name: metrics[name] for name in TOLD if name in metrics})

    def on_alarm(self, finding: Finding) -> None:
        """Report an alarm; notes are not reported."""
        if finding.alarm.level == "alarm":
            self.tell("running", text=f"{finding.alarm.name}: {finding.alarm.text} ({finding.evidence.text})")

    def on_warning(self, text: str) -> None:
        """Write a caution to the log."""
        log.warning("caution: %s", text)
