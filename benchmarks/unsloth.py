"""A step of Unsloth's trainer, in its environment, beside TRL's, klamp's `fast_scoring` and klamp's own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.elsewhere import compared
from benchmarks.records import Benchmark
from benchmarks.step import NAMES, QUICK_SHAPES, SHAPES, measured

PYTHON = Path(__file__).resolve().parent.parent / ".venv-unsloth" / "bin" / "python"


def run(quick: bool) -> dict[str, Any]:
    """Every trainer at each length of prompts, one after the other; Unsloth's by the interpreter that has it.

    Raises:
        FileNotFoundError: there is no such environment.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"no {PYTHON}: make it with scripts/environment.sh unsloth")
    model, settings = ("tiny", {"steps": 2, "warmup": 1}) if quick else ("3M", {"steps": 8, "warmup": 2})
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape, length in (QUICK_SHAPES if quick else SHAPES).items():
            place = partial(measured, Path(folder), model, length, count=1, settings=settings)
            found[f"{shape} prompts"] = place() + place(cases=("unsloth",), python=str(PYTHON))
    return {"places": found}


def text(results: Mapping[str, Any]) -> str:
    """A row per length of prompts and trainer."""
    return compared(results["places"], NAMES | {"unsloth": "Unsloth"})


BENCHMARK = Benchmark(
    name="unsloth",
    title="A step of Unsloth's trainer on a CPU",
    about="As `step`; Unsloth's trainer in the environment of `make test-unsloth`, with its older TRL. On a CPU "
    "Unsloth has neither its kernels nor models of its own, its compiler is off, and so is its way to run a prompt "
    "once for its completions, which is on by default on a GPU: what is measured is its trainer around a plain model.",
    run=run,
    text=text,
)
