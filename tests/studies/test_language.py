"""The plan of the language study: a control, prices, and a KL without an expected gradient, all else equal."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path

import yaml

from klamp.ablation.plan import Run, runs
from klamp.config import KLWarning
from klamp.training.config import TrainConfig
from studies.language import KL_PROMPTS, NO_KL, RIGHT, language_plan

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "describe.yaml"


def configured() -> dict[str, Run]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # k1 as a loss is in the plan because it is cautioned against
        return {run.arm.name: run for run in runs(language_plan(seeds=(0,)))}


def test_arms_differ_in_the_kl_and_in_nothing_else() -> None:
    found = [run.config.flat() for run in configured().values()]
    differing = {name for one, other in combinations(found, 2) for name in one if one[name] != other[name]}
    assert differing == {"beta", "kl_monitor", "kl_estimator", "kl_gradient"}


def test_the_control_has_no_kl_in_its_loss_and_measures_it() -> None:
    control = configured()[NO_KL.name].config.kl
    assert control.beta == 0 and control.needs_reference


def test_the_example_is_the_arm_of_the_right_price() -> None:
    """But for its length, how often it evaluates and saves, and where it reports to."""
    given = TrainConfig.from_flat(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))).flat()
    arm = configured()[f"beta {RIGHT:g}"].config.flat()
    differing = {name for name in given if given[name] != arm[name]}
    assert differing <= {"max_steps", "eval_every", "save_every", "report_to", "keep_checkpoints"}


def test_every_run_measures_its_kl_on_the_plans_prompts() -> None:
    assert {run.kl_prompts for run in configured().values()} == {KL_PROMPTS}
