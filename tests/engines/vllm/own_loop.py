"""Runs of klamp's own loop whose completions vLLM writes, on the CPU, and what they logged: JSON of name -> fields.

Two fields are none of klamp's: `stop`, after which step a run is stopped, to go on from there; and `pack`, to let vLLM
pack its weights as it does for models that are never loaded anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.training.test_controls import StopAfter

from klamp.errors import ModelError, TrainingStopped
from klamp.training import vllm_sampler
from klamp.training.config import TrainConfig
from klamp.training.folders import COMPLETIONS, METRICS_FILE, lines_of
from klamp.training.trainer import train_run


def logged(values: dict[str, Any]) -> dict[str, Any]:
    """The metrics of each step but its speed, and the largest difference of a log-probability from the policy's."""
    stop = values.pop("stop", None)
    values["output_dir"] = str(Path(tempfile.mkdtemp()) / "run")
    if stop is not None:
        with suppress(TrainingStopped):
            train_run(TrainConfig.from_flat(values), [StopAfter(stop)])
        values["resume"] = True
    folder = train_run(TrainConfig.from_flat(values)).output_dir
    rows = [row for row in lines_of(folder / METRICS_FILE) if "reward" in row]
    differences: dict[int, float] = {}
    for row in lines_of(folder / COMPLETIONS):
        pairs = zip(row["policy_logprobs"], row["sampler_logprobs"], strict=True)
        largest = max(abs(ours - theirs) for ours, theirs in pairs)
        differences[row["step"]] = max(largest, differences.get(row["step"], 0.0))
    kept = [{name: x for name, x in row.items() if not name.startswith("speed/")} for row in rows]
    return {"rows": kept, "differences": list(differences.values())}


def refused(values: dict[str, Any]) -> dict[str, Any]:
    """How a run ends whose engine packs its weights."""
    unpacked = vllm_sampler._pack_nothing
    vllm_sampler._pack_nothing = lambda: None
    try:
        return logged(values)
    except ModelError as error:
        return {"error": str(error)}
    finally:
        vllm_sampler._pack_nothing = unpacked


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])  # noqa: TID251  (a program of its own)
    print(
        json.dumps(
            {name: refused(values) if values.pop("pack", False) else logged(values) for name, values in runs.items()}
        )
    )
