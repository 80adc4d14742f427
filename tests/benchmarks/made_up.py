"""Results of every benchmark with made-up numbers, as the benchmarks themselves would return them."""

from __future__ import annotations

from typing import Any

from benchmarks import (
    controllers,
    elsewhere,
    exact,
    floor,
    gpu,
    head_cases,
    heads,
    language,
    over_floor,
    phases,
    references,
    scale,
    step,
    waits,
)


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


def elsewhere_results() -> dict[str, Any]:
    """Three trainers, of which TRL takes twice as long."""
    places = {}
    for name, (model, prompt, _) in elsewhere.PLACES.items():
        times = {"trl": 2.0, "fast": 1.0, "klamp": 0.9}
        place = {"model": model, "prompt": prompt, "shape": "", "beta": 0.04, "sets": 3}
        places[name] = [place | {"trainer": t} | seen(s, 50.0 * s, tokens=1024) for t, s in times.items()]
    return {"places": places}


def growth_results() -> dict[str, Any]:
    """Steps of two sizes, each trainer at twice the products."""
    phases = {"phases": {phase: [0.2] for phase in floor.PHASES}}
    points = []
    for over, values in over_floor.QUICK.items():
        for x in values:
            for case in over_floor.CASES:
                own = phases if case == step.FLOOR else {}
                time = 1.0 if case == step.FLOOR else 2.0
                place = {"over": over, "x": x, "model": "3M", "prompt": x, "trainer": case}
                points.append(place | seen(time, 10.0, tokens=1024) | own)
    return {"base": over_floor.BASE, "points": points}


def exact_results() -> dict[str, Any]:
    """Time and memory in proportion to the rows and the vocabulary."""
    points = []
    for over, sizes in (("N", [(256, 896, 151_936), (512, 896, 151_936)]), ("V", [(1024, 896, 8192)])):
        for size in sizes:
            for case in exact.CASES:
                work = size[0] * size[2] / 1e8
                x = size[0] if over == "N" else size[2]
                points.append(
                    {"theme": "exact", "over": over, "x": x, "size": size, "case": case} | seen(work, 1000 * work)
                )
    return {"points": points, "left_out": [{"over": "N", "size": (4096, 896, 151_936)}], "limit_gib": 6.0}


def scale_results() -> dict[str, Any]:
    """Linear in everything."""
    points = []
    for over, size in (("N", (1024, 256, 16_384)), ("V", (1024, 256, 16_384))):
        for x in (1024, 2048, 4096):
            for case in scale.HEADS[False]:
                points.append({"theme": "heads", "over": over, "x": x, "size": size, "case": case} | seen(x / 100, x))
    for over in ("group size", "prompt length"):
        for x in (8, 16):
            for case in ("trl", "klamp"):
                place = {"theme": "step", "over": over, "x": x, "case": case, "model": "3M", "prompt": 512}
                points.append(place | seen(x / 10, x))
    return {"points": points}


def profile_results() -> dict[str, Any]:
    place = {"phase": "generation", "file": "klamp/training/sampling.py", "function": "generate", "seconds": 0.25}
    runs = [
        {
            "model": "3M",
            "prompt": 8,
            "trainer": trainer,
            "phases": {"generation": 0.5, "backward": 1.0},
            "places": [place],
        }
        for trainer in phases.RULES
    ]
    return {"runs": runs}


def reference_results() -> dict[str, Any]:
    return {
        "model_mib": 200.0,
        "kinds": {kind: {"peak_mib": 1000.0 + 100 * i, "step_seconds": 1.0} for i, kind in enumerate(references.KINDS)},
    }


def controller_results() -> dict[str, Any]:
    """Two seeds of the default, and one rule whose KL never reached the target."""
    runs = []
    for rule, seed, kl in (("klamp: hold", 0, 0.05), ("klamp: hold", 1, 0.06), ("step", 0, 0.01)):
        kls, betas = [0.0, *[kl] * 59], [0.01 * (1 + step) for step in range(60)]
        found = controllers.judged(kls, betas, 0.05) | {
            "reward": 0.9,
            "addition": 0.99,
            "kl": kls[::5],
            "beta": betas[::5],
        }
        runs.append({"rule": rule, "target": 0.05, "seed": seed, "rate": controllers.RATE, "steps": 60} | found)
    return {"steps": 60, "runs": runs}


def language_results() -> dict[str, Any]:
    """Every case at twice its floor, so that the target is missed."""
    steps = [{"case": case, "tokens": 768} | seen(2.0, 500.0) for case in language.CASES]
    phases_of = {phase: [0.2] for phase in floor.PHASES}
    least = [
        {"case": name, "tokens": 768, "phases": phases_of, "seconds": [1.0], "load": 1.0} for name in language.FLOORS
    ]
    return {"shape": {}, "runs": [*steps, *least]}


def gpu_results() -> dict[str, Any]:
    """One head within its bound and one outside, a step that agrees with the CPU's, and the parts."""
    differences = [
        {"case": case, "dtype": "float32", "device": "cuda", "worst": {"hidden": worst}}
        for case, worst in zip(gpu.CHECKED[:2], (1e-6, 1e-3), strict=True)
    ]
    rows = {"rows": [dict.fromkeys(gpu.COMPARED, 0.5)]}
    parts = {"heads": head_results(), "step": whole_steps(), "overhead": step_results()}
    return {"heads": differences, "steps": {"device": rows, "cpu": rows}, "parts": parts}


def wait_results() -> dict[str, Any]:
    """A doctor that takes twice as long as reading JSON alone, and holds half a byte for each byte of the log."""
    commands = {name: {"seconds": [2.0], "peak_mib": 500e6 / 2**20} for name in waits.COMMANDS}
    commands["JSON of the log alone"]["seconds"] = [1.0]
    commands["klamp report"]["output_bytes"] = 1_500_000
    commands["klamp ablate"]["runs"] = 4
    return {"sizes": {"run": 10**8, "log": 10**9, "steps": 5000}, "commands": commands}


def batch_results() -> dict[str, Any]:
    """One size, in which klamp's micro-batches take a quarter less than TRL's."""
    place = {"model": "3M", "prompt": 512, "completion": 64, "accumulate": 2}
    return {"group": 8, "runs": [place | {"trainer": n} | seen(s, 50.0) for n, s in (("fast", 0.75), ("uncut", 1.0))]}


def unsloth_results() -> dict[str, Any]:
    """One length of prompts, of which Unsloth's trainer makes what TRL's does."""
    runs = elsewhere_results()["places"]["bfloat16"]
    return {"places": {"short prompts": [*runs, runs[0] | {"trainer": "unsloth"}]}}


RESULTS = {
    "unsloth": unsloth_results(),
    "gpu": gpu_results(),
    "waits": wait_results(),
    "language": language_results(),
    "heads": head_results(),
    "exact": exact_results(),
    "controllers": controller_results(),
    "step": whole_steps(),
    "overhead": step_results(),
    "batches": batch_results(),
    "floor": growth_results(),
    "elsewhere": elsewhere_results(),
    "scale": scale_results(),
    "profile": profile_results(),
    "references": reference_results(),
}


def record(name: str, *, quick: bool = False, date: str = "2026-11-21") -> dict[str, Any]:
    """A record of those results."""
    machine = {
        "device": "cpu",
        "processor": "a processor",
        "cores": 2,
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
    }
    return {
        "benchmark": name,
        "command": f"python -m benchmarks {name}" + (" --quick" if quick else ""),
        "date": date,
        "machine": machine | {"python": "3.11.7", "versions": {"torch": "2.13.0"}},
        "threads": 2,
        "load_before": 0.25,
        "results": RESULTS[name],
    }


ALL_CASES = tuple(head_cases.CASES)
