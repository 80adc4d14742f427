"""Results with round made-up numbers, as the benchmarks themselves would return them."""

from __future__ import annotations

from typing import Any

from benchmarks import gpu, heads


def seen(seconds: float, mib: float, **more: Any) -> dict[str, Any]:
    times = {"seconds": [seconds, 2 * seconds, seconds / 2], "cpu_seconds": [2 * seconds, 3 * seconds, seconds]}
    return times | {"extra_mib": mib, "load": 0.5, "threads": 2} | more


def head_results(seconds: dict[str, float] | None = None) -> dict[str, Any]:
    """Every case takes one second and 100 MiB, but for those given."""
    given = seconds or {}
    found = {case: seen(given.get(case, 1.0), 100.0, rows=1024) for case in heads.CASES}
    found["naive kl"]["rows"] = 512
    size = dict(zip(("rows", "width", "vocab"), heads.SIZES[False], strict=True))
    return {"size": size, "heads": {"float32": found, "bfloat16": found}}


def step_results(klamp: float = 1.0, trl: float = 2.0, kl: tuple[float, float] = (0.1, 0.4)) -> dict[str, Any]:
    """Two shapes, both trainers, with and without KL; `kl`: what it adds to klamp's and TRL's step."""
    runs = []
    for shape, prompt in (("short", 8), ("long", 512)):
        for trainer, base, added in (("trl", trl, kl[1]), ("klamp", klamp, kl[0])):
            for beta, time in ((0.04, base), (0.0, base - added)):
                place = {"model": "3M", "prompt": prompt, "shape": shape, "trainer": trainer, "beta": beta, "sets": 3}
                runs.append(place | seen(time, 50.0, tokens=1024))
    return {"group": 8, "completion": 64, "beta": 0.04, "runs": runs}


def whole_steps() -> dict[str, Any]:
    """Those with KL alone, as `step` returns them."""
    found = step_results()
    runs = [run for run in found["runs"] if run["beta"]]
    for run in [run for run in runs if run["trainer"] == "klamp"]:
        least = {name: value for name, value in run.items() if name != "extra_mib"}
        runs.append(run | {"trainer": "fast", "seconds": [1.25 * s for s in run["seconds"]], "extra_mib": 10.0})
        runs.append(least | {"trainer": "floor", "seconds": [0.8 * s for s in run["seconds"]]})
    return found | {"runs": runs}


def gpu_results() -> dict[str, Any]:
    """One head within its bound and one outside, a step that agrees with the CPU's, and the parts."""
    differences = [
        {"case": case, "dtype": "float32", "device": "cuda", "worst": {"hidden": worst}}
        for case, worst in zip(gpu.CHECKED[:2], (1e-6, 1e-3), strict=True)
    ]
    rows = {"rows": [dict.fromkeys(gpu.COMPARED, 0.5)]}
    parts = {"heads": head_results(), "step": whole_steps(), "overhead": step_results()}
    return {"heads": differences, "steps": {"device": rows, "cpu": rows}, "parts": parts}
