"""Runs of klamp's own loop whose completions vLLM writes, on the CPU, and what they logged: JSON of name -> fields.

Two fields are none of klamp's: `stop`, after which step a run is stopped, to go on from there; and `packs`, to let vLLM
pack its weights as it does for models that are never loaded anew: "seen" by klamp before, or "unseen".
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engines.vllm.amx import imitate_if_asked
from tests.training.test_controls import StopAfter

from klamp.errors import KlampError, TrainingStopped
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


def ended(values: dict[str, Any]) -> dict[str, Any]:
    """What a run logged, or how it ends: that of one takes no other with it."""
    kept = vllm_sampler.pack_nothing, vllm_sampler.check_packing
    packs = values.pop("packs", "")
    if packs:
        vllm_sampler.pack_nothing = lambda: None
    if packs == "unseen":
        vllm_sampler.check_packing = lambda dtype: None
    try:
        return logged(values)
    except KlampError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        vllm_sampler.pack_nothing, vllm_sampler.check_packing = kept


if __name__ == "__main__":
    imitate_if_asked()
    runs = json.loads(sys.argv[1])  # noqa: TID251  (a program of its own)
    print(json.dumps({name: ended(values) for name, values in runs.items()}))
