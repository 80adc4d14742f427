"""A step of Unsloth's trainer beside TRL's, klamp's `fast_scoring` and klamp's own, in Unsloth's environment."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.elsewhere import compared
from benchmarks.records import Benchmark
from benchmarks.step import NAMES, QUICK_SHAPES, SHAPES, TRAINERS, measured

PYTHON = Path(__file__).resolve().parent.parent / ".venv-unsloth" / "bin" / "python"


def run(quick: bool) -> dict[str, Any]:
    """Every trainer at each length of prompts, in turn, by the interpreter that has Unsloth.

    Raises:
        FileNotFoundError: there is no such environment.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"no {PYTHON}: make it with scripts/environment.sh unsloth")
    model, settings = ("tiny", {"steps": 2, "warmup": 1}) if quick else ("3M", {"steps": 8, "warmup": 2})
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{shape} prompts": measured(
                Path(folder),
                model,
                length,
                count=1,
                cases=(*TRAINERS, "unsloth"),
                settings=settings,
                python=str(PYTHON),
            )
            for shape, length in (QUICK_SHAPES if quick else SHAPES).items()
        }
    return {"places": found}


def text(results: Mapping[str, Any]) -> str:
    """A row per length of prompts and trainer."""
    return compared(results["places"], NAMES | {"unsloth": "Unsloth"})


BENCHMARK = Benchmark(
    name="unsloth",
    title="A step of Unsloth's trainer on a CPU",
    about="As `step`, in the environment of `make test-unsloth`, with its older TRL. On a CPU Unsloth has neither its "
    "kernels nor models of its own, its compiler is off, and so is its way to run a prompt once for its completions, "
    "which is on by default on a GPU: what is measured is its trainer and its loss around a plain model.",
    run=run,
    text=text,
)
