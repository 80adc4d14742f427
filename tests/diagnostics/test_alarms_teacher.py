"""Rules about a teacher: each on both sides of its threshold."""

from typing import Any

from tests.diagnostics.histories import history_of, look, noisy, rises

from klamp.doctor.examine import examine
from klamp.doctor.history import RunSettings


def test_a_teacher_that_gives_many_tokens_no_number() -> None:
    assert rises("teacher-silent", teacher__unscored=[0.11] * 5)
    assert not rises("teacher-silent", teacher__unscored=[0.09] * 5)
    assert not rises("teacher-silent", teacher__unscored=[0.11] * 4), "too few steps"
    assert rises("teacher-silent", **{"teacher__unscored": [0.09] * 5, "teacher__unscored.code": [0.11] * 5})


def test_a_teacher_that_is_not_reached() -> None:
    coef = {"teacher__coef": [1.0] * 60, "reward": [0.1] * 60}
    assert rises("teacher-not-reached", teacher__kl=[0.5] * 10 + [0.46] * 50, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.5] * 10 + [0.44] * 50, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.5] * 49, teacher__coef=[1.0] * 49), "too early"
    assert rises("teacher-not-reached", teacher__kl=[0.051] * 60, **coef)
    assert not rises("teacher-not-reached", teacher__kl=[0.049] * 60, **coef), "near enough"
    assert rises("teacher-not-reached", teacher__kl=[0.5] * 60, **coef, beta=[0.01] * 60), "too small to hold it"
    for other in ({"reward_std": [0.3] * 60}, {"beta": [0.1] * 60}, {"teacher__coef": [1.0] * 59 + [0.0]}):
        assert not rises("teacher-not-reached", teacher__kl=[0.5] * 60, **coef | other), "something else is trained on"


def test_without_a_coefficient_a_teacher_alone_is_trained_on() -> None:
    curves: dict[str, Any] = {"teacher__kl": [0.5] * 60}
    another = RunSettings(other_kernels=True)
    assert rises("teacher-not-reached", settings=another, reward=[0.0] * 60, **curves)
    assert not rises("teacher-not-reached", settings=another, reward=noisy(0.5, 60, scale=0.1), **curves)
    assert not rises("teacher-not-reached", settings=RunSettings(teacher_coef=0.0), **curves)


def test_of_several_teachers_one_that_is_not_reached_is_named() -> None:
    curves = {"teacher__kl": [0.5] * 10 + [0.2] * 50, "teacher__kl.code": [0.4] * 60, "teacher__coef": [1.0] * 60}
    evidence = look("teacher-not-reached", history_of(**curves))
    assert evidence is not None and evidence.text == "teacher/kl.code was 0.4 nats per token at first and is 0.4"


def test_a_teacher_that_is_the_policy_does_nothing() -> None:
    """Case: the adapter was on in the teacher's pass, so that the KL is 0 at every step."""
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


def test_numbers_of_a_teacher_that_repeat_or_are_gone_at_once() -> None:
    """From one step's metrics alone: no completions are logged."""
    assert rises("teacher-silent", teacher__repeated=[0.0, 0.81], teacher__kl=[0.5, 0.02])
    assert not rises("teacher-silent", teacher__repeated=[0.79], teacher__kl=[0.5])
    assert not rises("teacher-silent", teacher__repeated=[1.0], teacher__kl=[0.009]), "both are certain of everything"
    assert rises("teacher-silent", **{"teacher__repeated.code": [1.0], "teacher__kl.code": [0.5]}), "one of several"
    assert rises("teacher-silent", teacher__unscored=[0.0, 0.51])
    assert not rises("teacher-silent", teacher__unscored=[0.0, 0.49])
