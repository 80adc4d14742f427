"""What `klamp ablate` says before the runs and after them, written from plans and results alone."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from tests.ablation.outcomes import outcome

from klamp.ablation.execute import Result
from klamp.ablation.outcome import Outcome, write_outcome
from klamp.ablation.plan import Plan, grid, run_folder, runs
from klamp.ablation.table import summarise
from klamp.cli.ablate import show_plan, show_result

PLAN = Plan(base={"max_steps": 8, "report_to": ()}, arms=grid({"beta": [0.0, 0.1]}), seeds=(3, 5))


class Nowhere:
    """An executor that runs nothing."""

    def describe(self) -> str:
        return "nowhere"

    def run(self, runs, folder, tell) -> None:
        raise AssertionError("nothing is started")


def plan_text(folder: Path) -> str:
    out = io.StringIO()
    show_plan(Console(file=out), PLAN, runs(PLAN), folder=folder, executor=Nowhere())
    return " ".join(out.getvalue().split())


def test_a_plan_is_counted_and_its_arms_are_listed(tmp_path: Path) -> None:
    text = plan_text(tmp_path / "new")
    assert "runs 4: 2 arms x 2 seeds (3, 5) steps 32 in all" in text
    assert f"folder {tmp_path}/new (4 to run) where nowhere" in text
    assert "common max_steps=8, report_to=none" in text
    assert "arm beta beta=0 0 beta=0.1 0.1" in text
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_told_apart(tmp_path: Path) -> None:
    done, failed, begun, _ = runs(PLAN)
    for run, state in ((done, "done"), (failed, "failed")):
        own = run_folder(tmp_path, run)
        own.mkdir(parents=True)
        write_outcome(own, Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, state=state))
    (run_folder(tmp_path, begun) / "checkpoints" / "step-000002").mkdir(parents=True)
    assert "(1 done, 1 failed, to try again, 1 to continue, 1 to run)" in plan_text(tmp_path)


def test_a_result_names_its_files_once_compares_arms_and_says_what_is_not_drawn(tmp_path: Path) -> None:
    runs = [outcome(arm, i, after={"addition": x}) for arm, xs in SEEDS.items() for i, x in enumerate(xs)]
    names = ("table.md", "table.csv", "sweep.png", "sweep.pdf")
    result = Result(
        folder=tmp_path,
        outcomes=tuple(runs),
        table=summarise(runs),
        files=tuple(tmp_path / name for name in names),
        not_drawn={"courses.png": "no run logged a step"},
    )
    console = Console(file=io.StringIO(), width=200)
    show_result(console, result, "klamp ablate")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "table.md/.csv, sweep.png/.pdf\n" in text
    assert "not drawn    courses.png: no run logged a step\n" in text
    assert "Against free, seed by seed\n" in text and "could have shown" in text
    assert "a difference is shown for held" in " ".join(text.split())


SEEDS = {"free": (0.80, 0.84, 0.86), "held": (0.701, 0.741, 0.760)}
