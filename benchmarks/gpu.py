"""Everything that is to be known on a GPU, in one command: the numbers against the CPU's first, then the times.

`--quick` is the dry mode: the same program at the smallest sizes on whatever device there is, so that it is known to
work before it stands on a machine that is paid by the hour.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import heads, overhead, step
from benchmarks.head_cases import Inputs, make_inputs, prepared
from benchmarks.measure import isolated
from benchmarks.records import Benchmark, table
from benchmarks.step_runs import Seen, Setting, run_klamp, write_setting

CHECKED = ("linear_logprobs", "linear_logprobs, frozen head", "linear_kl")
CHECKED_SIZE = {True: (64, 32, 1000), False: (512, 896, 151_936)}
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Type -> the largest difference to float64 on the CPU that counts as rounding, as a share of the largest entry."""
HEADS = ("products", "linear_logprobs")
"""What the dry mode runs of the heads."""
DRY_SIZE = (64, 32, 1000)
COMPARED = ("reward", "policy/entropy", "kl/k3", "train/loss", "train/grad_norm")
"""Metrics of a run that are compared between the devices: klamp draws the same tokens on both, up to rounding."""
STEPS = 3


def run(quick: bool) -> dict[str, Any]:
    """Agreement with the CPU, heads, steps, the cost of the KL.

    Raises:
        SystemExit: there is no GPU, and it is no dry run.
    """
    import torch

    if not (quick or torch.cuda.is_available()):
        raise SystemExit(
            "python -m benchmarks gpu needs a GPU, and torch sees none here.\n"
            "`python -m benchmarks gpu --quick` runs the same program on the CPU at the smallest sizes, as a trial."
        )
    dtypes = tuple(BOUNDS)[: 1 if quick else None]
    found: list[dict[str, Any]] = []
    for dtype in dtypes:
        found += isolated("benchmarks.gpu:differences", {"dtype": dtype, "size": CHECKED_SIZE[quick]})["heads"]
    with tempfile.TemporaryDirectory() as folder:
        steps = _steps_on_both(Path(folder))
        parts = _dry(Path(folder)) if quick else _whole()
    return {"heads": found, "steps": steps, "parts": parts}


PARTS = (heads, step, overhead)


def _whole() -> dict[str, Any]:
    """The parts as they are on a CPU."""
    return {part.BENCHMARK.name: part.run(False) for part in PARTS}


def _dry(folder: Path) -> dict[str, Any]:
    """The parts at the smallest sizes."""
    few = {"steps": 2, "warmup": 1}
    runs = step.measured(folder, "tiny", 8, count=1, cases=(*step.TRAINERS, step.FLOOR), settings=few)
    return {"heads": _dry_heads(), "step": {"runs": runs}}


def _dry_heads() -> dict[str, Any]:
    measured = {case: heads.one(case, "float32", DRY_SIZE, 1) for case in HEADS}
    return {"size": dict(zip(("rows", "width", "vocab"), DRY_SIZE, strict=True)), "heads": {"float32": measured}}


def differences(dtype: str, size: Sequence[int]) -> dict[str, Any]:
    """Every head that is checked, in this process."""
    return {"heads": [_difference(case, dtype, size) for case in CHECKED]}


def _difference(case: str, dtype: str, size: Sequence[int]) -> dict[str, Any]:
    """The gradients of a head on this device less those of float64 on the CPU, as shares of the largest entry."""
    import torch

    given = make_inputs(tuple(size), dtype, reference=case == "linear_kl")  # pyright: ignore[reportArgumentType]
    prepared(case, given)()
    exact = Inputs(**{name: None if x is None else _exact(x) for name, x in vars(given).items()})
    prepared(case, exact)()
    worst = {}
    for name in ("hidden", "weight"):
        seen, right = getattr(given, name).grad, getattr(exact, name).grad
        if seen is not None and right is not None:
            worst[name] = float((seen.cpu().double() - right).abs().max() / right.abs().max())
    return {"case": case, "dtype": dtype, "device": torch.device(given.hidden.device).type, "worst": worst}


def _exact(x: Any) -> Any:
    """A tensor on the CPU, in 64 bits where it holds numbers that are not whole."""
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x


def _steps_on_both(folder: Path) -> dict[str, Any]:
    """The metrics of a short run on this machine's device and on its CPU."""
    model, prompts = write_setting(folder, "tiny", 8)
    common = {"trainer": "klamp", "model": model, "prompts": prompts, "steps": STEPS, "warmup": 0}
    places = {"device": Setting(**common), "cpu": Setting(cpu=True, **common)}
    return {name: isolated("benchmarks.gpu:metrics", {"setting": each.to_dict()}) for name, each in places.items()}


def metrics(setting: dict[str, Any]) -> dict[str, Any]:
    """The metrics of every step of a run of klamp's trainer in this process."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        run_klamp(Setting(**setting), folder, seen)
    return {"rows": [{name: row[name] for name in COMPARED} for row in seen.metrics]}


def text(results: Mapping[str, Any]) -> str:
    """What agrees with the CPU, then the tables of the parts."""
    lines = []
    for found in results["heads"]:
        for name, worst in found["worst"].items():
            what = f"{found['dtype']}: `{found['case']}`, gradient of {name}, largest difference to float64"
            bound = BOUNDS[found["dtype"]]
            lines.append(f"- {what}: {worst:.1e} (at most {bound:.0e}: {'met' if worst <= bound else '**missed**'})")
    device, cpu = (results["steps"][place]["rows"] for place in ("device", "cpu"))
    rows = [
        (number, name, f"{here[name]:.6g}", f"{there[name]:.6g}")
        for number, (here, there) in enumerate(zip(device, cpu, strict=True), start=1)
        for name in here
    ]
    parts = [
        "## The numbers against the CPU's",
        "\n".join(lines),
        table(("step", "metric", "here", "on the CPU"), rows),
    ]
    for name, found in results["parts"].items():
        module = {part.BENCHMARK.name: part for part in PARTS}[name]
        parts += [f"## {module.BENCHMARK.title}", module.text(found)]
    return "\n\n".join(parts)


BENCHMARK = Benchmark(
    name="gpu",
    title="klamp on a GPU",
    about="Gradients of the heads against float64 on the CPU; the metrics of a short run here and on the CPU, which "
    "draw the same tokens up to rounding; then `heads`, `step` and `overhead` as they are on a CPU.",
    run=run,
    text=text,
)
