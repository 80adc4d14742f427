"""The columns of an ablation's table: what each reads from an outcome, and when it has nothing to read."""

from __future__ import annotations

import math

import pytest
from tests.ablation.outcomes import BEFORE, failed, outcome

from klamp.ablation.columns import (
    BY_NAME,
    COLUMNS,
    GROUPS,
    retained_after,
    retained_before,
    retained_loss,
    retained_skills,
    rl_after,
    rl_gain,
)
from klamp.ablation.outcome import NUMBERS


def test_the_trained_skill_and_what_training_added() -> None:
    run = outcome(before={"addition": 0.25}, after={"addition": 0.75})
    assert (rl_after(run), rl_gain(run)) == (0.75, 0.5)
    assert rl_gain(outcome(before={})) is None, "without a score before there is no gain"
    assert rl_after(outcome(after={})) is None


def test_retained_skills_were_measured_twice_and_not_trained() -> None:
    run = outcome(before={**BEFORE, "only before": 1.0}, after={"addition": 0.9, "reversal": 0.5, "only after": 1.0})
    assert retained_skills(run) == ("reversal",)
    assert (retained_before(run), retained_after(run)) == (0.99, 0.5)
    assert retained_loss(run) == pytest.approx(0.49), "positive where something was forgotten"
    alone = outcome(before={"addition": 0.1}, after={"addition": 0.2})
    assert (retained_skills(alone), retained_before(alone), retained_loss(alone)) == ((), None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_none(bad: float) -> None:
    assert BY_NAME["kl/reverse"].value(outcome(numbers={"kl/reverse": bad})) is None


def test_a_failed_run_has_no_numbers_and_a_run_may_lack_some() -> None:
    assert all(column.value(failed()) is None for column in COLUMNS)
    run = outcome(numbers={"length": 4.0})
    assert BY_NAME["length"].value(run) == 4.0
    assert BY_NAME["kl/reverse"].value(run) is None


def test_every_column_reads_a_score_or_a_measured_number_and_stands_in_a_table() -> None:
    scores = {"rl/after", "rl/gain", "retained/after", "retained/loss"}
    assert scores <= set(BY_NAME) <= scores | set(NUMBERS)
    assert len(BY_NAME) == len(COLUMNS), "no two columns of one name"
    assert {column.group for column in COLUMNS} == set(GROUPS)


def test_a_heading_is_the_title_and_its_unit() -> None:
    assert BY_NAME["length"].heading == "length (tokens)"
    assert BY_NAME["reward"].heading == "reward"
