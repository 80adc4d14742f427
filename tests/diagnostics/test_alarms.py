"""The table of alarms."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnostics.histories import completion, history_of

from klamp.doctor import causes
from klamp.doctor.alarm import is_apart, least_and_most, noise
from klamp.doctor.alarms import ALARMS
from klamp.doctor.examine import CONTENTS
from klamp.doctor.history import History, RunSettings
from klamp.doctor.metrics import METRICS

FOREIGN = {"sampler/abs", "advantage/max"}
"""Metrics of other trainers that klamp does not log."""


def test_every_row_is_complete() -> None:
    for name, alarm in ALARMS.items():
        assert alarm.name == name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert alarm.text and alarm.needs and alarm.means.endswith(".") and alarm.next_step.endswith(".")


def test_what_an_alarm_needs_exists() -> None:
    for alarm in ALARMS.values():
        assert not alarm.concerns or alarm.concerns in CONTENTS
        for part in "|".join(alarm.needs).replace("+", "|").split("|"):
            if part.startswith("settings."):
                assert part.removeprefix("settings.") in RunSettings.__dataclass_fields__
            else:
                assert part in {*METRICS, *FOREIGN, *CONTENTS}


def test_an_empty_run_raises_nothing() -> None:
    assert not [name for name, alarm in ALARMS.items() if alarm.rule(History())]


VALUES = st.one_of(st.floats(), st.sampled_from([0.0, 1e308, -1e308, math.nan, math.inf, -math.inf]))
NAMED = ("k1", "k3", "exact", "reward", "length", "reward_std", "beta", "beta__price", "kl__k3_sequence", "kl__target")
NEW = ("groups__saturated", "length__repeated", "length__reward_correlation", "policy__entropy", "kl__over_budget")
TAUGHT = ("kl", "kl.math", "coef", "unscored", "teacher_mass", "overlap_ratio", "end", "reward_correlation")
TEACHER = ("train__teacher_penalty", *(f"teacher__{name}" for name in TAUGHT))
WATCHED = (*NAMED, "sampler__abs", "sampler__k3", "length__truncated", *NEW, *TEACHER)


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from(WATCHED), st.lists(VALUES, min_size=1, max_size=25)), st.lists(VALUES, min_size=3)
)
def test_no_value_breaks_a_rule(curves: dict[str, list[float]], logprobs: list[float]) -> None:
    """They run within training: a NaN may raise an alarm, never an error."""
    first, last = logprobs[:3], logprobs[-3:]
    values = {"policy": first, "sampler": last, "teacher": first, "advantage": logprobs[0], "reward": logprobs[1]}
    row = completion(max(map(len, curves.values()), default=0), **values)
    for view in history_of(**curves, written=[row, row]).replay():
        for alarm in ALARMS.values():
            alarm.rule(view)


def test_noise_is_the_deviation_around_a_course() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = (3 * torch.randn(4000, generator=generator)).tolist()
    rising = [x + 0.01 * i for i, x in enumerate(flat)]
    assert noise(flat) == pytest.approx(3, rel=0.05)
    assert noise(rising) == pytest.approx(3, rel=0.05)
    assert noise([1.0, 1.0, 1.0]) == 0


def test_apart_counts_standard_errors_of_the_difference() -> None:
    low, high = [0.0, 1.0] * 5000, [0.03, 1.03] * 5000
    error = math.sqrt(2 * 0.5 / 10_000)  # neighbours differ by 1: the variance of the noise is 1/2
    assert is_apart(low, high, errors=0.0299 / error)
    assert not is_apart(low, high, errors=0.0301 / error)
    assert is_apart(high, low, errors=1.0)
    assert not is_apart(low, low, errors=0.1)
    assert not is_apart([1.0], [9.0, 9.0], errors=0.0)


@pytest.mark.parametrize(("values", "quantile"), [(5, 6.7), (7, 4.9), (19, 3.4), (301, 3.02)])
def test_of_few_values_more_errors_are_asked_as_students_t_has_it(values: int, quantile: float) -> None:
    """The multiple that a mean of normal numbers leaves as seldom as three errors of a known variance (t tables)."""
    size = 1 + round(1.5 * (values - 1))  # differences of neighbours know two thirds as much
    curve = [0.0, 1.0] * size
    least, most = least_and_most(curve[:size])
    error = noise(curve[:size]) / math.sqrt(size)
    assert (most - least) / 2 / error == pytest.approx(quantile, rel=0.03)


def test_causes_come_with_their_number_and_a_run_that_shows_nothing_names_none() -> None:
    every = (causes.learning_rate, causes.no_kl, causes.pays_for_length)
    rates = {"train__learning_rate": [0.0, 0.3, 0.3]}
    lost = history_of(k3=[0.0, 0.6, 0.6], beta=[0.0] * 3, length__reward_correlation=[0.9] * 3, **rates)
    rate, beta, length = causes.likely_causes(lost, *every)
    assert "(up to 0.3): the KL rose by 0.6 nats" in rate and "beta is 0" in beta and "correlate by 0.90" in length
    calm = history_of(k3=[0.0, 0.01], beta=[0.1] * 2, length__reward_correlation=[0.1] * 2)
    assert causes.likely_causes(calm, *every) == [] == causes.likely_causes(lost)
    assert not causes.no_kl(History()), "nobody says that beta is 0"
