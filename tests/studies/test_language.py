"""The language study: its arms differ in the KL alone, its folder holds its plan, `klamp ablate` does the rest."""

import warnings
from itertools import combinations
from pathlib import Path

import pytest

from klamp.cli.ablate import parse_ablate
from klamp.config import KLWarning
from klamp.lab.ablate.plan import Run, runs
from studies import command
from studies.language import KL_PROMPTS, NO_KL, language_plan


@pytest.fixture
def arms() -> dict[str, Run]:
    """The runs of one seed by their arm's name; one arm is there because klamp warns about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return {run.arm.name: run for run in runs(language_plan(seeds=(0,)))}


def test_arms_differ_in_the_kl_and_in_nothing_else(arms: dict[str, Run]) -> None:
    settings = [run.config.flat() for run in arms.values()]
    differing = {name for one, other in combinations(settings, 2) for name in one if one[name] != other[name]}
    assert differing == {"beta", "kl_monitor", "kl_estimator", "kl_gradient"}
    assert {run.kl_prompts for run in arms.values()} == {KL_PROMPTS}
    control = arms[NO_KL.name].config.kl
    assert control.beta == 0 and control.needs_reference, "its KL is measured"


def test_the_plan_is_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "klamp", lambda argv: asked.append(argv) or 0)
    code, folder = command.ablate(language_plan(), ["--seeds", "0", "1", "--workers", "2"])
    assert (code, folder) == (0, Path("runs/ablation-language-001"))
    plan = language_plan(seeds=(0, 1))
    assert parse_ablate(["--plan", str(folder / "plan.yaml")])[0] == plan
    assert asked == [["ablate", "--plan", f"{folder}/plan.yaml", "--output_dir", str(folder), "--workers", "2"]]
