"""What a step costs with klamp's own decoding and with vLLM in its place, in processor seconds: FLAG ...

Processor seconds of one thread, since they hardly depend on what else a machine does. `sampling` is the weights' way
into vLLM and the completions; `step` is all of it.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from klamp.cli import main
from klamp.training import rollouts, vllm_sampler
from klamp.training.folders import METRICS_FILE, lines_of
from klamp.training.trainer import Trainer

SKIPPED = 2
"""Steps in which memory is taken for the first time."""


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, with the processor seconds of each call noted."""

    @functools.wraps(function)
    def calling(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = function(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return result

    return calling


def measured(sampler: str, *flags: str) -> dict[str, float]:
    """The medians over the steps of a run."""
    steps: list[float] = []
    sampling: list[float] = []
    kept = Trainer.train_step, rollouts._by_policy, vllm_sampler.sample
    Trainer.train_step = timed(kept[0], steps)
    rollouts._by_policy, vllm_sampler.sample = timed(kept[1], sampling), timed(kept[2], sampling)
    folder = Path(tempfile.mkdtemp()) / "run"
    try:
        main(["train", "--cpu", "--sampler", sampler, "--output_dir", str(folder), "--report_to", "none", *flags])
    finally:
        Trainer.train_step, rollouts._by_policy, vllm_sampler.sample = kept
    rows = [row for row in lines_of(folder / METRICS_FILE) if "reward" in row]
    tokens = [row["speed/tokens_per_second"] * row["speed/step_seconds"] for row in rows]
    sampling = sampling[-len(steps) :]  # vLLM's first answers are looked at before the first step
    return {
        "step": statistics.median(steps[SKIPPED:]),
        "sampling": statistics.median(sampling[SKIPPED:]),
        "tokens per second of sampling": statistics.median(
            each / seconds for each, seconds in list(zip(tokens, sampling, strict=True))[SKIPPED:]
        ),
        "tokens": statistics.median(tokens[SKIPPED:]),
        "sampler/k3": max(row["sampler/k3"] for row in rows),
    }


if __name__ == "__main__":
    for name in ("own", "vllm"):
        print(name, json.dumps(measured(name, *sys.argv[1:])))  # noqa: TID251  (a program of its own)
