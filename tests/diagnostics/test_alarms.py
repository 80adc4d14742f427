"""The table of alarms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnostics.histories import completion, history_of

from klamp.diagnostics.alarms import ALARMS, check_names
from klamp.diagnostics.history import RunSettings
from klamp.diagnostics.metrics import METRICS
from klamp.errors import UnknownNameError

FOREIGN = {"sampler/abs", "advantage/max"}
"""Metrics of other trainers that klamp does not log."""


def test_every_row_is_complete() -> None:
    for name, alarm in ALARMS.items():
        assert alarm.name == name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert alarm.text and alarm.needs
        assert alarm.means.endswith(".") and alarm.next_step.endswith(".")
        assert all(limit.unit and limit.source for limit in alarm.limits)


@pytest.mark.parametrize("name", ALARMS)
def test_every_alarm_has_a_test_of_its_rule(name: str) -> None:
    tests = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_alarms_*.py")]
    assert any(f'"{name}"' in text for text in tests)


def test_what_an_alarm_needs_exists() -> None:
    for alarm in ALARMS.values():
        for part in "|".join(alarm.needs).split("|"):
            if part.startswith("settings."):
                assert part.removeprefix("settings.") in RunSettings.__dataclass_fields__
            else:
                assert part in {*METRICS, *FOREIGN, "completions", "evaluations", "sampler_logprobs"}


def test_an_empty_run_raises_nothing() -> None:
    empty: Mapping[str, list[float]] = {}
    assert not [name for name, alarm in ALARMS.items() if alarm.rule(history_of(**empty))]


VALUES = st.one_of(st.floats(), st.sampled_from([0.0, 1e308, -1e308, math.nan, math.inf, -math.inf]))
NAMED = ("k1", "k3", "exact", "reward", "length", "reward_std", "beta", "beta__price", "kl__k3_sequence")
NEW = ("groups__saturated", "length__repeated", "length__reward_correlation", "policy__entropy", "kl__over_budget")
WATCHED = (*NAMED, "sampler__abs", "sampler__k3", "length__truncated", *NEW)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(WATCHED), st.lists(VALUES, min_size=1, max_size=25)), st.lists(VALUES, min_size=3)
)
def test_no_value_breaks_a_rule(curves: dict[str, list[float]], logprobs: list[float]) -> None:
    """They run within training: a NaN may raise an alarm, never an error."""
    history = history_of(**curves)
    row = completion(
        history.step, policy=logprobs[:3], sampler=logprobs[-3:], advantage=logprobs[0], reward=logprobs[1]
    )
    history.add_completions([row, row])
    for view in history.replay():
        for alarm in ALARMS.values():
            alarm.rule(view)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    check_names(ALARMS)
    with pytest.raises(UnknownNameError, match="did you mean 'kl-spike'"):
        check_names(["kl-spikes"])
