"""The plans of the studies: the arms that a question needs, each a configuration that does what it says."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from klamp.ablation.plan import Plan, Run, runs
from klamp.config import KLWarning
from klamp.errors import UnknownNameError
from klamp.training.config import TrainConfig
from studies.clipping import CLIPS, CONTROL, FORMS, PER_TOKEN, TOTAL, clipping_plan
from studies.language import KL_PROMPTS, NO_KL, RIGHT, language_plan

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "language" / "describe.yaml"


def arms_of(plan: Plan) -> dict[str, Run]:
    """The runs of a plan by their arm's name; some arms are there because they are cautioned against."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return {run.arm.name: run for run in runs(plan)}


def configured(**changes: object) -> dict[str, Run]:
    """One seed of the clipping study."""
    return arms_of(clipping_plan(seeds=(0,), **changes))  # pyright: ignore


def differing(every: dict[str, Run]) -> set[str]:
    """The fields in which two arms differ."""
    found = [run.config.flat() for run in every.values()]
    return {name for one, other in combinations(found, 2) for name in one if one[name] != other[name]}


def test_both_clips_with_both_thresholds_in_both_places_against_no_clip_and_no_kl() -> None:
    found = {name: run.config.kl for name, run in configured().items()}
    assert len(found) == 1 + 2 * 5 + 4
    for place in ("loss", "reward"):
        arms = [found[place], *(found[f"{place}, {clip}"] for clip in CLIPS)]
        assert {kl.kl_placement for kl in arms} == {place}
        assert {kl.beta for kl in arms} == {0.1}
        seen = {(kl.kl_clip_method, kl.use_per_token_kl_threshold, kl.kl_clip_threshold) for kl in arms[1:]}
        assert seen == {(m, per, PER_TOKEN if per else TOTAL) for m in ("hard", "soft") for per in (True, False)}
        assert arms[0].kl_clip_method == "none"
        assert all(kl.kl_reference_length is None for kl in arms), "the reference's own length, measured and frozen"
    assert [name for name, kl in found.items() if kl.beta == 0] == [CONTROL.name]
    assert found[CONTROL.name].needs_reference, "its KL is measured"


def test_arms_differ_in_the_kl_and_in_nothing_else() -> None:
    clipping = configured()
    assert {name for name in differing(clipping) if not name.startswith("kl_")} == {
        "beta",
        "use_per_token_kl_threshold",
    }
    assert len({str(sorted(run.config.flat().items(), key=str)) for run in clipping.values()}) == len(clipping)
    language = arms_of(language_plan(seeds=(0,)))
    assert differing(language) == {"beta", "kl_monitor", "kl_estimator", "kl_gradient"}


def test_a_soft_clip_is_no_wider_than_a_tenth_of_its_budget() -> None:
    """At the reference's length, 7.6 tokens: 4 fillers, 2.6 digits and the end."""
    for name, run in configured().items():
        kl = run.config.kl
        budget = kl.kl_clip_threshold * (7.6 if kl.use_per_token_kl_threshold else 1)
        assert kl.kl_clip_method != "soft" or kl.kl_clip_temperature <= budget / 10, name


def test_only_the_printed_forms_are_cautioned_against() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs(clipping_plan(seeds=(0,)))
    assert sorted(str(each.message).split(" with")[0] for each in caught) == ["kl_estimator='k1'", "kl_estimator='k3'"]


def test_seeds_and_the_base_can_be_changed() -> None:
    plan = clipping_plan(seeds=(3, 4), base={"max_steps": 5})
    assert plan.seeds == (3, 4)
    assert {run.config.run.max_steps for run in configured(base={"max_steps": 5}).values()} == {5}
    assert configured(base={"beta": 0.2})["loss"].config.kl.beta == 0.2
    assert configured(base={"beta": 0.2})[CONTROL.name].config.kl.beta == 0
    with pytest.raises(UnknownNameError, match="max_steps"):
        configured(base={"max_step": 5})


def test_every_form_is_unclipped() -> None:
    assert all("kl_clip_method" not in arm.values for arm in FORMS)
    found = configured()
    fixed = found["loss, sequence horizon, fixed divisor"].config
    plain = found["loss, sequence horizon"].config.kl
    price = fixed.kl.beta / fixed.rollout.max_completion_length
    assert price == pytest.approx(plain.beta / 7.6, rel=0.02), "the same price per nat at the reference's length"


def test_the_language_study_measures_every_kl_on_its_prompts_also_that_of_its_control() -> None:
    every = arms_of(language_plan(seeds=(0,)))
    assert {run.kl_prompts for run in every.values()} == {KL_PROMPTS}
    control = every[NO_KL.name].config.kl
    assert control.beta == 0 and control.needs_reference


def test_the_example_is_the_language_studys_arm_of_the_right_price() -> None:
    """But for its length, how often it evaluates and saves, and where it reports to."""
    given = TrainConfig.from_flat(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))).flat()
    arm = arms_of(language_plan(seeds=(0,)))[f"beta {RIGHT:g}"].config.flat()
    others = {name for name in given if given[name] != arm[name]}
    assert others <= {"max_steps", "eval_every", "save_every", "report_to", "keep_checkpoints"}
