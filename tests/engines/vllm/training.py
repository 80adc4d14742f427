"""`klamp train --backend trl` with completions of vLLM's on the CPU, and what it logged: FLAG ..."""

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl.generation.vllm_generation as generation
from tests.engines.vllm.weights import use_here

from klamp.cli import main
from klamp.doctor.readers import read_record
from klamp.lab.folders import lines_of
from klamp.names import COMPLETIONS

# TRL asks for no data type, and vLLM would take bfloat16 for float32 weights.
DTYPE = "bfloat16" if "bfloat16" in sys.argv else "float32"  # noqa: TID251  (a program of its own)
generation.LLM = functools.partial(generation.LLM, dtype=DTYPE, enforce_eager=True)
use_here()


def logged(*flags: str) -> dict[str, Any]:
    """The metrics of each step, and the largest difference of a log-probability in vLLM from that in the trainer."""
    folder = Path(tempfile.mkdtemp()) / "run"
    status = main(["train", "--backend", "trl", "--output_dir", str(folder), *flags])
    rows = [row.metrics for row in read_record(folder).rows]
    differences: dict[int, float] = {}
    for row in lines_of(folder / COMPLETIONS):
        pairs = zip(row["policy_logprobs"], row["sampler_logprobs"], strict=True)
        largest = max(abs(ours - theirs) for ours, theirs in pairs)
        differences[row["step"]] = max(largest, differences.get(row["step"], 0.0))
    return {"status": status, "rows": rows, "differences": list(differences.values())}


if __name__ == "__main__":
    print(json.dumps(logged(*sys.argv[1:])))  # noqa: TID251  (a program of its own)
