"""The record of a run as it lies in the tree: short numbers, no paths or wall times, few completions."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from klamp.doctor.examine import Diagnosis, examine
from klamp.doctor.history import WRITTEN
from klamp.doctor.readers import read_record
from klamp.names import ALARMS_FILE, COMPLETIONS, CONFIG, METRICS_FILE, SUMMARY

FOLDER = Path(__file__).resolve().parent
DIGITS = 6
"""Significant digits of every number."""
LEFT_OUT = ("speed/", "memory/")
"""Beginnings of the names of metrics that another machine, or another day, gives otherwise."""
OF_A_COMPLETION = (
    *("step", "prompt", "reward", "advantage", "tokens", "ended", "trained"),
    *("policy_logprobs", "ref_logprobs", "sampler_logprobs"),
)
"""What the alarms read of a completion."""
PATHS = ("model", "ref_model", "output_dir")
"""RunSettings that are paths of the machine where the run was trained: the last part of each stays."""


def write(run: Path, record: Path, diagnosis: Diagnosis) -> None:
    """Write the record of a run anew; a ValueError if the doctor finds something else in the record."""
    steps = sorted({row["step"] for row in lines(run / COMPLETIONS)})
    for some in (_around(diagnosis, steps), steps):
        shutil.rmtree(record, ignore_errors=True)
        record.mkdir(parents=True)
        _write(run, record, some)
        if said(examine(read_record(record))) == said(diagnosis):
            return
    raise ValueError(f"{record.name}: with short numbers the doctor finds something else")


def said(diagnosis: Diagnosis) -> list[tuple[Any, ...]]:
    return [(each.alarm.name, each.first_step, each.alarm.level) for each in diagnosis.findings]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def short(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [short(inner) for inner in value]
    return {name: short(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _around(diagnosis: Diagnosis, steps: Collection[int]) -> list[int]:
    """The steps whose completions a finding rests on, with the first one and the last ones of the run."""
    ends = [max(steps, default=0), *(each.first_step for each in diagnosis.findings)]
    wanted = {1, *(end - back for end in ends for back in range(WRITTEN))}
    return [step for step in steps if step in wanted]


def _write(run: Path, record: Path, steps: Collection[int]) -> None:
    config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    config |= {name: Path(config[name]).name for name in PATHS if config[name]}
    (record / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    skill = json.loads((run / SUMMARY).read_text(encoding="utf-8"))["rl_skill"]
    (record / SUMMARY).write_text(json.dumps({"rl_skill": skill}) + "\n", encoding="utf-8")
    rows = lines(run / METRICS_FILE)
    _put(record / METRICS_FILE, [{n: x for n, x in row.items() if not n.startswith(LEFT_OUT)} for row in rows])
    completions = [row for row in lines(run / COMPLETIONS) if row["step"] in steps]
    _put(record / COMPLETIONS, [{n: row[n] for n in OF_A_COMPLETION if n in row} for row in completions])
    told = lines(run / ALARMS_FILE)
    _put(record / ALARMS_FILE, [{name: row[name] for name in ("step", "name", "level")} for row in told])


def _put(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(short(row), separators=(",", ":")) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")
