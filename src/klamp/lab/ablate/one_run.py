"""One run of an ablation: train (or continue), measure, write the outcome; a program of its own."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from klamp.errors import KlampError, TrainingStopped
from klamp.lab.ablate.measure import measure
from klamp.lab.ablate.plan import Run, run_folder
from klamp.lab.ablate.results import Outcome, failed, write_outcome
from klamp.lab.backends import train_run
from klamp.lab.folders import newest_policy, row_of
from klamp.names import CONFIG, SUMMARY

log = logging.getLogger(__name__)


def perform(run: Run, folder: Path) -> Outcome:
    """Train a run in the folder of its ablation (from its newest checkpoint), measure it, and write its outcome.json.

    An error of the run is a `failed` outcome. An interrupt is raised; the next call continues the run.
    """
    own = run_folder(folder, run)
    own.mkdir(parents=True, exist_ok=True)
    try:
        settings = replace(run.config.run, output_dir=str(own), resume=(own / CONFIG).exists())
        summary = finished(own, settings.max_steps) or vars(train_run(replace(run.config, run=settings)))
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
    return write_outcome(own, outcome)


def outcome_of(run: Run, own: Path, summary: Mapping[str, Any]) -> Outcome:
    """Measure a finished run in its folder; `summary` is the content of its summary.json."""
    numbers = measure(run.config, own, prompts=run.kl_prompts)
    numbers |= {name: value for name, value in summary["final_metrics"].items() if name == "beta"}
    scores = {name: summary[name] for name in ("rl_skill", "before", "after")}
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, numbers=numbers, **scores)


def finished(own: Path, steps: int) -> Mapping[str, Any] | None:
    """The summary of the run in a folder if its training has all its steps, else None."""
    file = own / SUMMARY
    if not file.exists() or newest_policy(own) is None:
        return None
    summary = row_of(file.read_text(encoding="utf-8"))
    return summary if summary is not None and summary["steps"] >= steps else None


def main(own: Path) -> int:
    """Do the run that stdin holds in its folder, until stdin is closed; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    run = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_stop_with_the_command, daemon=True).start()
    try:
        return int(perform(run, own.parent.parent).state == "failed")
    except (KeyboardInterrupt, TrainingStopped) as stopped:
        log.warning("%s", stopped)
        return 130


def _stop_with_the_command() -> None:
    """Interrupt this process when the command that started it has died, which closes stdin."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))  # noqa: TID251  (started by klamp.lab.ablate.execute)
