"""Few samples scatter: what chance alone shows in a sound run is no alarm, and the same in earnest is one."""

from typing import Any

import pytest
from tests.diagnostics.histories import history_of

from klamp.doctor.examine import examine
from klamp.doctor.history import RunSettings

WILD = [0.01, 0.09, 0.02, 0.08, 0.01, 0.06, 0.03, 0.12, 0.02, 0.05]
SOLVED = [0.5, 0.25, 0.75, 0.5, 1.0, 0.5, 0.75, 0.75, 0.5, 0.25]
"""Rewards of 4 completions a step."""
CUT, KEPT = [0.0, 0.25, 0.0, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0, 0.25]
OF_REFERENCE = {"settings": RunSettings(other_reference=True)}
TAUGHT, EQUAL = {"teacher__coef": [1.0] * 60}, {"groups__saturated": [1.0] * 20}

PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a step's KL by one token": (
        "kl-spike", {"k3": [*WILD, 0.9, 0.04]}, {"k3": [*WILD, 0.9, 0.8]},
    ),
    "a KL of one token a completion": (
        "detached-reference", {"k3": [*WILD, 0.05, 0.0004]}, {"k3": [*WILD, 0.05, 0.0]},
    ),
    "a reference of 8 tokens": (
        "reference-differs", {"k3": [0.04], "length": [8.0], **OF_REFERENCE},
        {"k3": [0.08], "length": [8.0], **OF_REFERENCE},
    ),
    "a k1 of 4 tokens": (
        "negative-k1", {"k1": [0.1, -0.3, 0.2, 0.1], "length": [1.0] * 4, "settings": RunSettings(prompts=4)},
        {"k1": [0.1, -4.0, 0.2, 0.1], "length": [1.0] * 4, "settings": RunSettings(prompts=4)},
    ),
    "a k1 that is 0 by chance": (
        "k3-far-above-k1", {"k1": [0.2, -0.1, 0.15, -0.2, -0.03], "k3": [0.08] * 5},
        {"k1": [0.01, -0.01, 0.005, 0.01, -0.01], "k3": [0.8] * 5},
    ),
    "a bad token of a sampler": (
        "sampler-mismatch", {"sampler__k3": [0.001, 0.002, 0.03, 0.001, 0.002] * 2, "length": [8.0] * 10},
        {"sampler__k3": [0.05, 0.02, 0.06, 0.03, 0.02] * 2, "length": [8.0] * 10},
    ),
    "7 of 20 completions are cut": (
        "truncated", {"length__truncated": [*CUT, *KEPT, 0.5, 0.25, 0.5, 0.25, 0.25]},
        {"length__truncated": [*CUT, *KEPT, *[1.0] * 10]},
    ),
    "cut at the start by chance": (
        "truncated",
        {"length__truncated": [0.5, 0.25, 0.5, 0.25, 0.0, *CUT, *KEPT, 0.5, 0.25, 0.25, 0.5, 0.0], **EQUAL},
        {"length__truncated": [0.75, 0.5, 1.0, 0.5, 0.75] * 4, **EQUAL},
    ),
    "a completion in a loop": (
        "repetition", {"length__repeated": [0.2, 0.3, 0.1, 0.2, 0.3, 0.2, 0.9, 0.9, 0.2, 0.3]},
        {"length__repeated": [0.2, 0.3, 0.1, 0.2, 0.3, 0.8, 0.9, 0.9, 0.8, 0.9]},
    ),
    "20 groups of one a step": (
        "saturated", {"groups__saturated": [0.0] * 5 + [1.0] * 25, "settings": RunSettings(prompts=1)},
        {"groups__saturated": [0.0] * 5 + [1.0] * 60, "settings": RunSettings(prompts=1)},
    ),
    "a reward by 4 completions": (
        "reward-collapse", {"reward": [*SOLVED, 1.0, 1.0, 0.75, 1.0, 0.75, *SOLVED, 0.25, 0.5, 0.25, 0.0, 0.25]},
        {"reward": [*SOLVED, *SOLVED, *SOLVED, *[0.0] * 25]},
    ),
    "two completions without a score": (
        "teacher-silent", {"teacher__unscored": [0.0, 0.25, 0.0, 0.3, 0.0] + [0.0] * 15},
        {"teacher__unscored": [0.25, 0.5, 0.25, 0.3, 0.25] * 4},
    ),
    "a KL to a teacher that scatters": (
        "teacher-not-reached", {"teacher__kl": [0.3, 0.1, 0.9, 0.2, 0.1] * 11 + [0.1, 0.1, 1.4, 0.1, 0.2], **TAUGHT},
        {"teacher__kl": [0.5, 0.4, 0.6, 0.5, 0.5] * 12, **TAUGHT},
    ),
}  # fmt: skip
"""What is seen -> its alarm, the sound run, the one in which it is true."""


@pytest.mark.parametrize(("alarm", "sound", "unsound"), PAIRS.values(), ids=PAIRS)
def test_chance_is_no_alarm_and_a_real_fault_is_one(alarm: str, sound: dict[str, Any], unsound: dict[str, Any]) -> None:
    assert alarm not in {each.alarm.name for each in examine(history_of(**sound)).findings}
    assert alarm in {each.alarm.name for each in examine(history_of(**unsound)).findings}
