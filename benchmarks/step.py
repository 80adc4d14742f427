"""A whole GRPO step with its KL: klamp's trainer against TRL's, on the same model, prompts, reward and settings."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step_runs import BETA, COMPLETION, GROUP, LONG, SHORT, Setting, write_setting

MODELS = {True: ("3M",), False: ("3M", "27M")}
SHAPES = {"short": SHORT, "long": LONG}
QUICK_SHAPES = {"short": SHORT, "medium": 128}
TRAINERS = ("trl", "klamp")
STEPS = {"tiny": (3, 1), "3M": (8, 2), "27M": (4, 1)}
"""Model -> steps of a run, and how many of them are warm-up."""
QUICK_STEPS = {"steps": 3, "warmup": 1}
TARGETS = {"short": 1.3, "long": 2.5}


def run(quick: bool) -> dict[str, Any]:
    """Both trainers on both shapes of prompts, each twice."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            seen
            for model in MODELS[quick]
            for shape, length in (QUICK_SHAPES if quick else SHAPES).items()
            for seen in measured(Path(folder), model, length, shape=shape, **repetition(quick))
        ]
    return {"group": GROUP, "completion": COMPLETION, "beta": BETA, "runs": runs}


def repetition(quick: bool) -> dict[str, Any]:
    """How often a run is made and how long it is, as `measured` takes it."""
    return {"count": 1, "settings": QUICK_STEPS} if quick else {"count": 2}


def measured(
    folder: Path,
    model: str,
    length: int,
    *,
    count: int,
    shape: str = "",
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Every trainer on one model and one length of prompts, in turn, `count` times."""
    path, prompts = write_setting(folder, model, length)
    steps, warmup = STEPS[model]
    common = {"model": path, "prompts": prompts, "steps": steps, "warmup": warmup} | dict(settings or {})
    runs = {
        trainer: partial(
            isolated, "benchmarks.step_runs:one", {"setting": Setting(trainer=trainer, **common).to_dict()}
        )
        for trainer in TRAINERS
    }
    place = {"model": model, "prompt": length, "shape": shape, "beta": BETA}
    return [place | {"trainer": name} | pooled(results) for name, results in rounds(runs, count).items()]


def pairs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Mapping[str, Any]]]:
    """The runs that belong together: trainer -> run, for each model and length."""
    grouped: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for seen in runs:
        key = (seen["model"], seen["prompt"])
        grouped.setdefault(key, {})[seen["trainer"]] = seen
    return list(grouped.values())


def throughput(seen: Mapping[str, Any]) -> float:
    """Completion tokens per second."""
    return seen["tokens"] / middle(seen["seconds"])


def text(results: Mapping[str, Any]) -> str:
    """The table and the targets."""
    rows, verdicts = [], []
    for pair in pairs(results["runs"]):
        for trainer, seen in pair.items():
            rows.append(
                (
                    seen["model"],
                    seen["prompt"],
                    trainer,
                    spread(seen["seconds"]),
                    f"{throughput(seen):,.0f}",
                    f"{throughput(seen) / throughput(pair['trl']):.2f}×",
                    f"{middle(seen['cpu_seconds']):.2f}",
                    f"{seen['extra_mib']:,.0f}",
                )
            )
        own = pair["klamp"]
        if own["shape"] in TARGETS:
            ratio = throughput(own) / throughput(pair["trl"])
            what = f"{own['model']}, prompts of {own['prompt']}: klamp's throughput over TRL's"
            verdicts.append(verdict(what, ratio, TARGETS[own["shape"]], at_least=True))
    headings = ("model", "prompt", "trainer", "seconds per step, median (range)", "tokens/s", "against TRL")
    return table((*headings, "CPU seconds", "extra peak MiB"), rows) + "\n\n" + "\n".join(verdicts)


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of throughput and memory."""
    runs = {f"{r['model']}, prompts {r['prompt']}, {r['trainer']}": r for r in results["runs"]}
    rate = {name: throughput(seen) for name, seen in runs.items()}
    memory = {name: seen["extra_mib"] for name, seen in runs.items()}
    panels = [
        Panel(title="a whole GRPO step with KL", label="completion tokens per second", bars=rate),
        Panel(title="memory above the loaded models", label="extra peak MiB", bars=memory),
    ]
    draw(panels, file)


BENCHMARK = Benchmark(
    name="step",
    title="A whole GRPO step with KL: klamp and TRL",
    about=f"Random Qwen2 models from a configuration, float32, full training with AdamW: 3M (192 wide, 4 layers, "
    f"vocabulary 8,192) and 27M (384 wide, 8 layers, 32,768). A step: 2 prompts, {GROUP} completions each of exactly "
    f"{COMPLETION} tokens (no model ends early; the count is checked), sampled with transformers, a reward that costs "
    f"nothing, one on-policy update, beta {BETA} against a frozen copy. TRL runs without gradient checkpointing, mixed "
    "precision, logging and progress bars; on the CPU its head also scores the prompt, which it does not on a GPU. "
    "klamp runs with its defaults, its metrics and its log included. Seconds are from the end of one step to the end "
    "of the next, the first steps left out; tokens are those of completions.",
    run=run,
    text=text,
    plot=plot,
)
