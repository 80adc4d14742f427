"""`klamp report RUN...`: one HTML file that shows or compares runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from klamp.cli.commands import ReportOptions, read_command
from klamp.cli.text import duration, say, show_caution, train_command
from klamp.doctor.examine import examine
from klamp.doctor.history import History
from klamp.doctor.metrics import as_number
from klamp.doctor.readers import read_record
from klamp.doctor.readers.klamp_run import is_klamp_run, runs_in
from klamp.errors import DataError, RunFolderError, without_credentials
from klamp.files import followed
from klamp.lab.ablate.results import read_outcome
from klamp.lab.config import TrainConfig
from klamp.lab.folders import read_config
from klamp.names import COMPLETIONS, METRICS_FILE, TRAINER_STATE
from klamp.report.page import GENERATOR, render
from klamp.report.run import ReportRun, judged
from klamp.report.text import count


def run(argv: Sequence[str]) -> int:
    """Write the page of one or several runs; returns the exit code."""
    options: ReportOptions = read_command("report", argv)[0]
    alone = options.runs[0] if len(options.runs) == 1 and options.runs[0].is_dir() else Path()
    file = options.output or alone / "report.html"
    if file.is_file() and f'content="{GENERATOR} ' not in file.read_text("utf-8", errors="replace")[:2000]:
        why, fix = "it would be written over", "choose another --output"
        raise RunFolderError("the file exists and is no report", got=str(file), why=why, fix=fix)
    runs = read_runs(records(options.runs))
    for run in runs:
        if run.history.is_empty:
            show_caution(f"{run.path}: its record holds no step; there is nothing to draw")
    page = render(runs)
    file.write_text(page, encoding="utf-8", newline="\n")
    words = f"{count(len(runs), 'run')}, {judged([run.diagnosis for run in runs])}"
    say(f"{file}: {words}, {len(page.encode()) / 1000:.0f} kB")
    return 0


def records(paths: Sequence[Path]) -> list[Path]:
    """The records to read: for the folder of a sweep its runs; a DataError if one is named twice."""
    sources: list[Path] = []
    for path in paths:
        good, without = runs_in(path)
        for folder in without:
            show_caution(f"{folder} is left out: it holds no record of a run")
        sources += good or [path]
    twice = [str(path) for path in sources if sources.count(path) > 1]
    if twice:
        raise DataError("a run is named twice", got=twice[0], why="a page shows each run once", fix="name it once")
    return sources


def read_runs(paths: Sequence[Path]) -> list[ReportRun]:
    """The runs, read and diagnosed; a DataError if a record cannot be read."""
    runs: list[ReportRun] = []
    for path, name in zip(paths, names_of(paths), strict=True):
        history = read_record(path)
        outcome = read_outcome(path) if is_klamp_run(path) else None
        runs.append(
            ReportRun(
                name=name,
                path=str(path),
                group=re.sub(r"_seed-\d+$", "", name),  # in a sweep
                diagnosis=examine(history),
                said=_said(path, history),
                outcome={} if outcome is None else outcome.numbers,
            )
        )
    return runs


def _said(path: Path, history: History) -> list[str]:
    """How a run was made, on what, when and how long it took, in words; nothing where its record does not say."""
    details, seed = history.details, history.config.get("seed")
    words = [*details.words[:2], *(f"KL: {kl}" for kl in details.words[2:])]
    if is_klamp_run(path):
        values, defaults = read_config(path)[1].flat(), TrainConfig().flat()
        changed = {name: values[name] for name in values if name != "seed" and values[name] != defaults[name]}
        words = [without_credentials(train_command(**changed))]
    if not words:
        return []
    day = [] if details.when is None else [f"{datetime.fromtimestamp(details.when):%Y-%m-%d}"]
    steps = sum(row.metrics.get("speed/step_seconds", 0.0) for row in history.rows)
    times = [time for time in (as_number(details.seconds), steps) if time is not None and math.isfinite(time)]
    took = ["not ended"] if details.seconds is None else [duration(max(times))] if times else []
    seeds = [] if seed is None else [f"seed {seed}"]
    return [*words, *seeds, *filter(None, [details.versions.get("hardware")]), *day, *took]


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each path: its last part, or the whole path if several end alike."""
    common = (TRAINER_STATE, METRICS_FILE, COMPLETIONS)  # tell no runs apart
    places = [followed(path.parent if path.name in common and path.parent.name else path) for path in paths]
    names = [place.name for place in places]
    whole = names if len(set(names)) == len(names) else list(map(str, places))
    return whole if len(set(whole)) == len(whole) else list(map(str, paths))
