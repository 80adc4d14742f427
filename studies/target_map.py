"""`python -m studies.target_map`: where `hold` holds its target, and where it does not: studies/results/target-map.md.

The cells are fixed here, one change at a time from the defaults at two targets; none was chosen, or left out, after it
had been run. Each is a run of `klamp train` in a process of its own with one thread: one JSON line for each cell and
seed that is done, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.language.tasks import score_happy

from benchmarks.measure import isolated
from benchmarks.records import table
from klamp.lab.tasks.arithmetic import base_model_folder, stored
from studies.small_language import RECIPE, teach

RECORD = Path(__file__).resolve().parent / "results" / "target-map.jsonl"
SEEDS = (42, 43, 44, 45, 46)
MARK = "<!-- written by `python -m studies.target_map` -->"
HELD, TARGETS = 0.8, (0.05, 0.1)
"""The share of a run's steps that have to be in the band; the targets that everything else is changed at."""
SETTLING, BAND = 20, 0.3
"""Steps after the KL first reached its target from which it is judged, and over which it is averaged; how far off."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "60 steps": {"max_steps": 60},
    "300 steps": {"max_steps": 300},
    "constant rate": {"lr_scheduler_type": "constant"},
    "half the rate": {"learning_rate": 5e-5},
    "twice the rate": {"learning_rate": 2e-4},
    "three times the rate": {"learning_rate": 3e-4},
    **{f"{n} prompts": {"prompts_per_step": n} for n in (4, 8, 64)},
    **{f"groups of {n}": {"num_generations": n} for n in (2, 4, 16)},
    "KL in the reward": {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"},
    "KL in the advantage": {"kl_placement": "advantage", "kl_estimator": "k1", "kl_horizon": "sequence"},
    "advantages divided by the deviation": {"scale_rewards": "std"},
    "TRL": {"backend": "trl"},
}
LANGUAGE: Mapping[str, Any] = {
    "model": "examples/language/smollm2",
    "task": "examples/language/tasks.py:describe",
    "dtype": "bfloat16",
    "lora_r": 16,
    "learning_rate": 5e-4,
    "warmup_steps": 3,
    "lr_scheduler_type": "constant",
    "temperature": 0.7,
    "prompts_per_step": 4,
    "max_steps": 60,
}
STORIES: Mapping[str, Any] = {
    "task": "stories.jsonl",
    "reward": "studies.target_map:happy_words",
    "max_completion_length": 100,
    "learning_rate": 3e-4,
    "max_steps": 100,
}
CELLS: Mapping[str, Mapping[str, Any]] = {
    **{f"{target:g}": {"target_kl": target} for target in (0.01, 0.02, 0.05, 0.1, 0.15)},
    **{f"{target:g}, {name}": {"target_kl": target, **c} for name, c in CHANGES.items() for target in TARGETS},
    **{
        f"{target:g}, describe, 24 tokens": {"target_kl": target, "max_completion_length": 24, **LANGUAGE}
        for target in (0.02, 0.05)
    },
    **{
        f"{target:g}, stories, 100 tokens, {n} prompts": {"target_kl": target, "prompts_per_step": n, **STORIES}
        for n in (4, 8)
        for target in (0.02, 0.05)
    },
}
"""Name -> fields of `TrainConfig` besides the defaults and 150 steps."""


def happy_words(completion: str, **_: object) -> float:
    """The reward of `describe`, for stories."""
    return score_happy(completion)


def one(cell: str, seed: int) -> dict[str, Any]:
    """Run a cell once: how well the target was held, and the KL and beta of every step."""
    from klamp.doctor.readers import read_record
    from klamp.lab.backends import launch, train_run
    from klamp.lab.config import TrainConfig

    values = {"max_steps": 150, "seed": seed, **CELLS[cell]}
    sparse = {"eval_every": 0, "save_every": 0, "report_to": (), "log_completions": 0, "eval_size": 8}
    with tempfile.TemporaryDirectory() as folder:
        if values.get("task") == STORIES["task"]:
            model = stored(base_model_folder().parent / f"stories-{RECIPE}", teach)
            values |= {"model": str(model), "task": str(model / STORIES["task"])}
        config = TrainConfig.from_flat({"output_dir": folder + "/run", **sparse, **values})
        if config.run.backend == "local":
            train_run(config)
        else:
            launch(config, [])
        course = [row.metrics for row in read_record(Path(folder, "run")).rows]
    kl, beta, reward = ([row.get(name, 0.0) for row in course] for name in ("kl/exact", "beta", "reward"))
    if not any(kl):
        kl = [row["kl/k3"] for row in course]
    found = {"cell": cell, "seed": seed, **judged(kl, beta, values["target_kl"]), "reward": fmean(reward[-20:])}
    return found | {name: [float(f"{x:.4g}") for x in course] for name, course in (("kl", kl), ("betas", beta))}


def judged(kl: Sequence[float], beta: Sequence[float], target: float) -> dict[str, Any]:
    """How well a KL was held: see the columns of the table.

    `in_band` is the share of the steps, from 20 after the KL first reached its target, at which its mean over the last
    20 steps is within 30 % of it; `moved` the largest factor of beta within 5 of these steps; None where the KL never
    reached it. `peak` is the highest mean over 10 steps, in targets, and `last` the mean over the last 20 steps.
    """
    first = next((step for step, value in enumerate(kl) if value >= target), None)
    begin = len(kl) if first is None else first + SETTLING
    means = [fmean(kl[step - SETTLING + 1 : step + 1]) / target for step in range(begin, len(kl))]
    windows = [beta[step : step + 6] for step in range(begin, len(beta) - 5)]
    return {
        "reached": first,
        "in_band": fmean(abs(mean - 1) <= BAND for mean in means) if means else None,
        "peak": max(fmean(kl[step : step + 10]) for step in range(max(1, len(kl) - 9))) / target,
        "moved": max((max(each) / min(each) if min(each) > 0 else float("inf") for each in windows), default=None),
        "last": fmean(kl[-SETTLING:]) / target,
        "highest_beta": max(beta),
        "last_beta": beta[-1],
    }


def read(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that are done."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["cell"], row["seed"]): row for row in map(json.loads, lines)}


def rows(done: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The runs of each cell, in the order of the cells; one that was not run has none."""
    return [(cell, [found for (name, _), found in sorted(done.items()) if name == cell]) for cell in CELLS]


def share(found: Mapping[str, Any]) -> float:
    """The share of a run's steps in the band; 0 where the KL ended outside of it without ever reaching the target."""
    return float(abs(found["last"] - 1) <= BAND) if found["in_band"] is None else found["in_band"]


def text(done: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
    """The table of the page: one line for each cell, red where a run of it failed."""
    lines = []
    for cell, runs in rows(done):
        shares = [share(run) for run in runs]
        sign = "not run" if not runs else "🟩 held" if min(shares) >= HELD else "🟥 fails"
        sign += f", {len(runs)} of {len(SEEDS)} seeds" if 0 < len(runs) < len(SEEDS) else ""
        moved = max((run["moved"] or 1.0 for run in runs), default=0.0)
        lasts = " ".join(f"{run['last']:.2f}" for run in runs)
        lines.append((cell, sign, " ".join(f"{x:.0%}" for x in shares), lasts, f"{moved:.2f}" if runs else ""))
    return table(("cell", "", "in the band, each seed", "last 20 steps, in targets", "beta in 5 steps"), lines)


def draw(done: Mapping[tuple[str, int], Mapping[str, Any]], file: Path) -> None:
    """A square for each run with its per cent of steps in the band, red where it failed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = [(cell, runs) for cell, runs in rows(done) if runs]
    figure, place = plt.subplots(figsize=(4.5, 0.24 * len(found) + 0.8))
    for y, (_, runs) in enumerate(found):
        for x, each in enumerate(map(share, runs)):
            colour = "tab:green" if each >= HELD else "tab:red"
            place.text(
                x, y, f"{100 * each:.0f}", color="white", backgroundcolor=colour, fontsize=8, ha="center", va="center"
            )
    place.set_yticks(range(len(found)), [cell for cell, _ in found], fontsize=8)
    place.set(
        xticks=[],
        xlabel=f"each seed: % of steps in the band, red below {100 * HELD:.0f}",
        xlim=(-0.5, max(len(runs) for _, runs in found) - 0.5),
        ylim=(len(found) - 0.3, -0.7),
    )
    figure.savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing; write the page and the picture of what is there."""
    parser = argparse.ArgumentParser(prog="python -m studies.target_map", description=f"{len(CELLS)} cells")
    parser.add_argument("--cells", nargs="*", metavar="CELL", default=list(CELLS), help="these alone; none: the page")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--record", type=Path, default=RECORD, help="the file of finished runs")
    given = parser.parse_args(argv)
    done = read(given.record)
    for seed in given.seeds:
        for cell in given.cells:
            if (cell, seed) not in done:
                found = isolated("studies.target_map:one", {"cell": cell, "seed": seed}, threads=1)
                with given.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                print(cell, seed, {k: v for k, v in found.items() if k not in ("kl", "betas")}, flush=True)
    done = read(given.record)
    page = given.record.with_suffix(".md")
    kept, _, _ = page.read_text(encoding="utf-8").partition(MARK) if page.exists() else ("", "", "")
    page.write_text(f"{kept}{MARK}\n\n{text(done)}\n", encoding="utf-8")
    draw(done, given.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
