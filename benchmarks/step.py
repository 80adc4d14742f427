"""A whole GRPO step with its KL: klamp's trainer against TRL's, on the same model, prompts, reward and settings.

`fast` is TRL's trainer with klamp's `fast_scoring`, `floor` the matrix products and the attention that no step of this
size can do without; older records do not have them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.floor import Shape
from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step_runs import BETA, COMPLETION, GROUP, LONG, SHORT, Setting, write_setting

MODELS = {True: ("3M",), False: ("3M", "27M")}
SHAPES = {"short": SHORT, "long": LONG}
QUICK_SHAPES = {"short": SHORT, "medium": 128}
TRAINERS = ("trl", "fast", "klamp")
FLOOR = "floor"
NAMES = {"trl": "TRL", "fast": "klamp.trl, fast_scoring", "klamp": "klamp train", FLOOR: "products alone"}
STEPS = {"tiny": (3, 1), "3M": (8, 2), "27M": (4, 1)}
"""Model -> steps of a run, and how many of them are warm-up."""
QUICK_STEPS = {"steps": 3, "warmup": 1}
TARGETS = {"short": 1.3, "long": 2.5}
FAST_TARGETS = {"short": 1.4, "long": 4.0}
"""Shape -> throughput of TRL with `fast_scoring` over TRL's own, at least."""
FAST_MEMORY, FAST_SECONDS = 1 / 3, 1.25
"""Its extra memory over TRL's own and its seconds over those of klamp's trainer, at most."""
FLOOR_TARGETS = {"3M": 1.4, "27M": 1.25}
"""Model -> seconds of klamp's trainer over the floor, at most."""


def run(quick: bool) -> dict[str, Any]:
    """Both trainers on both shapes of prompts, each twice."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            seen
            for model in MODELS[quick]
            for shape, length in (QUICK_SHAPES if quick else SHAPES).items()
            for seen in measured(
                Path(folder), model, length, shape=shape, cases=(*TRAINERS, FLOOR), **repetition(quick)
            )
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
    cases: Sequence[str] = TRAINERS,
    settings: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> list[dict[str, Any]]:
    """Every case on one model and one length of prompts, in turn, `count` times, by an interpreter."""
    path, prompts = write_setting(folder, model, length)
    steps, warmup = STEPS.get(model, (0, 0))
    common = {"model": path, "prompts": prompts, "steps": steps, "warmup": warmup} | dict(settings or {})
    runs = {name: partial(isolated, *_call(Setting(trainer=name, **common), length), python=python) for name in cases}
    place = {"model": model, "prompt": length, "shape": shape, "beta": BETA}
    return [place | {"trainer": name} | pooled(results) for name, results in rounds(runs, count).items()]


def _call(setting: Setting, length: int) -> tuple[str, dict[str, Any]]:
    """What measures a case, and with which arguments: a trainer's step, or the floor of one."""
    if setting.trainer != FLOOR:
        return "benchmarks.step_runs:one", {"setting": setting.to_dict()}
    sizes = Shape(prompts=setting.prompts_per_step, prompt=length, group=setting.group, completion=setting.completion)
    counted = max(1, setting.steps - setting.warmup)
    given = {"lora_r": setting.lora_r, "reference": setting.beta > 0, "repeats": counted}
    return "benchmarks.floor:one", {"model": setting.model, "shape": asdict(sizes), **given}


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
                    NAMES[trainer],
                    spread(seen["seconds"]),
                    f"{throughput(seen):,.0f}",
                    f"{throughput(seen) / throughput(pair['trl']):.2f}×",
                    over_floor(pair, trainer),
                    f"{middle(seen['cpu_seconds']):.2f}",
                    f"{seen['extra_mib']:,.0f}" if "extra_mib" in seen else "",
                )
            )
        own = pair["klamp"]
        if own["shape"] in TARGETS:
            ratio = throughput(own) / throughput(pair["trl"])
            what = f"{own['model']}, prompts of {own['prompt']}: klamp's throughput over TRL's"
            verdicts.append(verdict(what, ratio, TARGETS[own["shape"]], at_least=True))
            verdicts += [*_fast_verdicts(pair), *_floor_verdicts(pair)]
    headings = (
        "model",
        "prompt",
        "trainer",
        "seconds per step, median (range)",
        "tokens/s",
        "against TRL",
        "over products",
    )
    return table((*headings, "CPU seconds", "extra peak MiB"), rows) + "\n\n" + "\n".join(verdicts)


def over_floor(pair: Mapping[str, Mapping[str, Any]], trainer: str) -> str:
    """A trainer's seconds over those of the products and the attention alone; empty where they were not measured."""
    if FLOOR not in pair:
        return ""
    return f"{middle(pair[trainer]['seconds']) / middle(pair[FLOOR]['seconds']):.2f}×"


def _floor_verdicts(pair: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The target of klamp's trainer, where the floor was measured."""
    own = pair["klamp"]
    if FLOOR not in pair or own["model"] not in FLOOR_TARGETS:
        return []
    ratio = middle(own["seconds"]) / middle(pair[FLOOR]["seconds"])
    what = f"{own['model']}, prompts of {own['prompt']}: klamp's seconds over the products alone"
    return [verdict(what, ratio, FLOOR_TARGETS[own["model"]])]


def _fast_verdicts(pair: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The targets of `fast_scoring`, where it was measured."""
    if "fast" not in pair:
        return []
    fast, stock, own = pair["fast"], pair["trl"], pair["klamp"]
    what = f"{fast['model']}, prompts of {fast['prompt']}: fast_scoring in TRL"
    rate, seconds = throughput(fast) / throughput(stock), middle(fast["seconds"]) / middle(own["seconds"])
    return [
        verdict(f"{what}, throughput over TRL's", rate, FAST_TARGETS[fast["shape"]], at_least=True),
        verdict(f"{what}, extra memory over TRL's", fast["extra_mib"] / stock["extra_mib"], FAST_MEMORY),
        verdict(f"{what}, seconds over klamp's", seconds, FAST_SECONDS),
    ]


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of throughput and memory."""
    runs = {f"{r['model']}, prompts {r['prompt']}, {NAMES[r['trainer']]}": r for r in results["runs"]}
    rate = {name: throughput(seen) for name, seen in runs.items()}
    memory = {name: seen["extra_mib"] for name, seen in runs.items() if "extra_mib" in seen}
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
    "klamp runs with its defaults, its metrics and its log included; klamp.trl with fast_scoring as TRL does. The "
    "products alone are those of a step that runs each distinct prompt once, with its attention: no norm, activation, "
    "softmax, sampling or optimizer. Seconds are from the end of one step to the end "
    "of the next, the first steps left out; tokens are those of completions.",
    run=run,
    text=text,
    plot=plot,
)
