"""Rules about a teacher: each on both sides of its threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.diagnostics.histories import completion, history_of, look, noisy

from klamp.diagnostics.doctor import examine
from klamp.diagnostics.history import RunSettings


def rises(name: str, *, settings: RunSettings | None = None, **curves: Any) -> bool:
    return look(name, history_of(settings=settings, **curves)) is not None


@pytest.mark.parametrize(
    ("name", "metric", "wrong", "right", "steps"),
    [
        ("teacher-silent", "teacher__unscored", 0.11, 0.09, 5),
        ("teacher-outside-head", "teacher__teacher_mass", 0.49, 0.51, 5),
        ("teacher-ends-elsewhere", "teacher__end", 0.049, 0.051, 5),
        ("teacher-prefers-wrong", "teacher__reward_correlation", -0.31, -0.29, 10),
    ],
)
def test_a_mean_past_its_limit(name: str, metric: str, wrong: float, right: float, steps: int) -> None:
    assert rises(name, **{metric: [wrong] * steps})
    assert not rises(name, **{metric: [right] * steps})
    assert not rises(name, **{metric: [wrong] * (steps - 1)}), "too few steps"
    found = look(name, history_of(**{metric: [right] * steps, f"{metric}.code": [wrong] * steps}))
    assert found is not None and found.text.endswith(f" ({metric.replace('__', '/')}.code)")


def test_a_teacher_that_is_not_reached() -> None:
    coef = {"teacher__coef": [1.0] * 60, "reward": [0.1] * 60}
    assert rises("teacher-not-reached", teacher__kl=[0.5] * 10 + [0.46] * 50, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.5] * 10 + [0.44] * 50, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.5] * 49, teacher__coef=[1.0] * 49), "too early"
    assert rises("teacher-not-reached", teacher__kl=[0.051] * 60, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.049] * 60, **coef), "near enough"
    for other in ({"reward_std": [0.3] * 60}, {"beta": [0.1] * 60}, {"teacher__coef": [1.0] * 59 + [0.0]}):
        assert not rises("teacher-not-reached", teacher__kl=[0.5] * 60, **coef | other), "something else is trained on"


def test_of_several_teachers_one_that_is_not_reached_is_named() -> None:
    curves = {"teacher__kl": [0.5] * 10 + [0.2] * 50, "teacher__kl.code": [0.4] * 60, "teacher__coef": [1.0] * 60}
    found = look("teacher-not-reached", history_of(**curves))
    assert found is not None and found.text == "teacher/kl.code was 0.4 nats per token at first and is 0.4"


@pytest.mark.parametrize(("fall", "wrong"), [(0.06, True), (0.04, False)])
def test_heads_that_come_apart(fall: float, wrong: bool) -> None:
    early, late = noisy(0.8, 10, scale=0.002), noisy(0.8 - fall, 10, scale=0.002, seed=1)
    assert rises("teacher-outside-head", teacher__overlap_ratio=early + late) is wrong
    assert not rises("teacher-outside-head", teacher__overlap_ratio=(early + late)[1:])
    two = {"teacher__overlap_ratio": [0.8] * 20, "teacher__overlap_ratio.code": early + late}
    assert rises("teacher-outside-head", **two) is wrong
    loud = noisy(0.8, 10, scale=0.2) + noisy(0.8 - fall, 10, scale=0.2)
    assert not rises("teacher-outside-head", teacher__overlap_ratio=loud), "within its noise"


def test_a_teacher_that_is_the_policy_does_nothing() -> None:
    """Case: the adapter was on in the teacher's pass, so that the KL is 0 at every step."""
    assert rises("teacher-inert", teacher__kl=[9e-5] * 5)
    assert not rises("teacher-inert", teacher__kl=[1.1e-4] * 5)
    assert not rises("teacher-inert", teacher__kl=[9e-5] * 4)
    moving = {"reward": [0.2, 0.25, 0.31, 0.38], "teacher__coef": [0.1] * 4}
    assert rises("teacher-inert", teacher__kl=[0.0] * 4, **moving)
    assert rises("teacher-inert", teacher__kl=[0.3] * 3, **{"teacher__kl.code": [0.0] * 3}), "one of several"
    assert not rises("teacher-inert", teacher__kl=[0.0] * 2, **moving)
    assert not rises("teacher-inert", teacher__kl=[0.0] * 3 + [1e-9], **moving)
    assert not rises("teacher-inert", teacher__kl=[0.0] * 4, groups__saturated=[1.0] * 4), "nothing moved"
    assert not rises("teacher-inert", teacher__kl=[0.0] * 4, teacher__coef=[0.0] * 4), "not yet in force"
    assert not rises("teacher-inert", teacher__kl=[0.3] * 5 + [1e-5] * 5), "it was reached"
    assert not rises("teacher-inert", teacher__kl=[0.0] * 5 + [0.1] * 5), "it follows the policy slowly"


def test_a_teacher_that_is_never_in_the_loss_does_nothing() -> None:
    """Case: its log-probabilities are fetched, and dropped before the loss."""
    curves = {"teacher__kl": [0.3] * 10, "teacher__coef": [1.0] * 10}
    assert rises("teacher-inert", train__teacher_penalty=[0.0] * 10, **curves)
    assert not rises("teacher-inert", train__teacher_penalty=[0.0] * 9 + [1e-9], **curves)
    assert not rises("teacher-inert", train__teacher_penalty=[0.0] * 9, **curves)
    assert not rises("teacher-inert", **curves), "in the advantage it has no part of the loss"
    late = curves | {"teacher__coef": [0.0] * 10}
    assert not rises("teacher-inert", train__teacher_penalty=[0.0] * 10, **late), "not yet in force"
    asked = history_of(settings=RunSettings(teacher_coef=0.1), train__loss=[0.31, 0.3, 0.32])
    (found,) = (each for each in examine(asked).findings if each.alarm.name == "teacher-inert")
    assert found.evidence.text == "a teacher is configured, with coefficient 0.1; the last 3 steps have no teacher/kl"
    for coef, loss, more in ((0.1, [0.3] * 2, {}), (None, [0.3] * 3, {}), (0.1, [0.3] * 3, {"teacher__kl": [0.2] * 3})):
        assert not rises("teacher-inert", settings=RunSettings(teacher_coef=coef), train__loss=loss, **more)


def strengths(coef: float, *, kl: float = 0.1, steps: int = 20) -> dict[str, Any]:
    named = {"teacher__coef": coef, "teacher__kl": kl, "length__mean": 5.0, "reward_std": 0.2}
    return {name: [value] * steps for name, value in named.items()}


def test_a_teacher_that_the_reward_outweighs_does_nothing() -> None:
    least = 0.005 * 0.2 / math.sqrt(2 * 0.5)  # a pull of price * sqrt(2 KL) / s
    assert rises("teacher-inert", **strengths(0.9 * least))
    assert not rises("teacher-inert", **strengths(1.1 * least))
    assert not rises("teacher-inert", **strengths(0.9 * least, steps=19))
    assert not rises("teacher-inert", **strengths(0.9 * least, kl=0.009)), "so near to it nothing has to pull"
    scaled = RunSettings(scale_rewards="std")
    assert not rises("teacher-inert", settings=scaled, **strengths(0.9 * least / 0.2 * 1.3))
    assert rises("teacher-inert", settings=scaled, **strengths(1.1 * least)), "advantages are larger by 1 / s"


def test_a_teacher_that_drowns_the_reward() -> None:
    """Case: a teacher that earns 0.04 of a reward of 0 or 1; at coefficient 1 the end is 0.1, at 0.3 it is 0.53."""
    assert rises("teacher-drowns-reward", **strengths(1.01))  # (0.2 / 1)^2 / 2 = 0.02
    assert not rises("teacher-drowns-reward", **strengths(0.99))
    assert not rises("teacher-drowns-reward", **strengths(1.01, steps=9))
    assert not rises("teacher-drowns-reward", **{**strengths(1.01), "reward_std": []}), "no reward, nothing drowns"


def constant(teacher: float, *, policy: float = 0.2, count: int = 7) -> bool:
    history = history_of(teacher__kl=[1.0])
    row = {"policy": (-1.0, -1.0 - policy, -1.0), "teacher": (-2.0, -2.0 - teacher, -2.0)}
    history.add_completions([completion(**row)] * count)
    return look("teacher-silent", history) is not None


def test_constant_log_probabilities() -> None:
    assert constant(0.0) and constant(9e-5)
    assert not constant(1.1e-4)
    assert not constant(0.0, policy=0.09), "both are certain of everything"
    assert not constant(0.0, count=6), "18 tokens are too few"
    plain = history_of(k3=[0.1])
    plain.add_completions([completion()] * 20)
    assert look("teacher-silent", plain) is None
