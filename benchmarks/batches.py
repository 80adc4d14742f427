"""What it saves that a prompt's completions share a micro-batch: `fast_scoring` with klamp's cut and with TRL's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import middle, pooled, spread
from benchmarks.records import Benchmark, table
from benchmarks.step_runs import GROUP, Setting, write_setting
from benchmarks.turns import in_turn

CASES = {"fast": "klamp's", "uncut": "TRL's"}
WARMUP = 2
SIZES = (("3M", 8, 64), ("3M", 512, 64))
"""Model, tokens of a prompt, and of a completion."""
QUICK_SIZES = (("tiny", 8, 64),)
ROUNDS, QUICK_ROUNDS = 4, 2
ACCUMULATED = (2, 4)
"""Micro-batches of an optimizer step."""


def run(quick: bool) -> dict[str, Any]:
    """Both ways of cutting a step, a step at a time in turn."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, prompt, completion in QUICK_SIZES if quick else SIZES:
            path, prompts = write_setting(Path(folder), model, prompt)
            steps = WARMUP + (QUICK_ROUNDS if quick else ROUNDS)
            common = {"model": path, "prompts": prompts, "completion": completion, "steps": steps, "warmup": WARMUP}
            for accumulate in ACCUMULATED:
                pair = {name: Setting(trainer=name, accumulate=accumulate, **common) for name in CASES}
                place = {"model": model, "prompt": prompt, "completion": completion, "accumulate": accumulate}
                runs += [place | {"trainer": name} | pooled([seen]) for name, seen in in_turn(pair).items()]
    return {"group": GROUP, "runs": runs}


def text(results: Mapping[str, Any]) -> str:
    """A row per size: both ways, and what klamp's costs more."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for seen in results["runs"]:
        place = (seen["model"], seen["prompt"], seen["completion"], seen["accumulate"])
        found.setdefault(place, {})[seen["trainer"]] = seen["cpu_seconds"]
    rows = [
        (*place, spread(cases["fast"]), spread(cases["uncut"]), f"{_share(cases):+.1%}")
        for place, cases in found.items()
    ]
    headings = ("model", "prompt", "completion", "micro-batches", *(f"{name} (CPU seconds)" for name in CASES.values()))
    return table((*headings, "difference"), rows)


def _share(cases: Mapping[str, list[float]]) -> float:
    differences = [one - other for one, other in zip(cases["fast"], cases["uncut"], strict=True)]
    return middle(differences) / middle(cases["uncut"])


BENCHMARK = Benchmark(
    name="batches",
    title="Micro-batches that keep a prompt's completions together",
    about="A step of `klamp.trl.GRPOTrainer` with `fast_scoring` and TRL's own KL, cut into micro-batches as klamp "
    "does (the completions of a prompt together) and as TRL does (shuffled). Two processes take their steps in turn; "
    "the difference is the median over rounds of klamp's CPU seconds less TRL's, generation included.",
    run=run,
    text=text,
)
