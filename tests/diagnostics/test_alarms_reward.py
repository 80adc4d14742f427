"""Rules over what the reward makes of a policy: where each threshold lies."""

from __future__ import annotations

import pytest
from tests.diagnostics.histories import history_of, look


def wiggle(values: list[float], size: float = 0.01) -> list[float]:
    return [value + size * (-1) ** i for i, value in enumerate(values)]


def collapsed(*levels: float, steps: int = 10, **curves: list[float]) -> bool:
    reward = wiggle([level for level in levels for _ in range(steps)])
    return look("reward-collapse", history_of(reward=reward, **curves)) is not None


def test_a_reward_collapses_by_three_tenths_of_its_best() -> None:
    assert collapsed(0.3, 0.7, 0.45) and not collapsed(0.3, 0.7, 0.55)
    assert collapsed(-0.2, -0.5), "a reward may be negative"
    assert not collapsed(0.7, 0.2, steps=4)
    assert not collapsed(0.02, 0.0, reward_std=[0.1] * 20), "less than half of what completions differ by"


def test_a_collapse_says_so_where_the_learning_rate_did_it() -> None:
    kl = [0.0] * 8 + [0.5 * i for i in range(12)]
    found = look("reward-collapse", history_of(reward=wiggle([0.7] * 10 + [0.0] * 10), k3=kl, beta=[0.01] * 20))
    assert found is not None and found.causes[0].startswith("the learning rate: one step moved the policy by 0.5 nats")


def paid(length: float, correlation: float) -> bool:
    lengths = wiggle([10.0] * 10 + [length] * 10, 0.1)
    curves = {"length": lengths, "length__reward_correlation": [correlation] * 20}
    return look("length-exploited", history_of(**curves)) is not None


def test_length_is_exploited_where_it_grows_and_pays() -> None:
    assert paid(16, 0.4)
    assert not paid(14, 0.4) and not paid(16, 0.2) and not paid(16, -0.5)


def test_repetition_is_half_of_the_tokens_and_more_than_before() -> None:
    def repeated(start: float, now: float, steps: int = 5) -> bool:
        return look("repetition", history_of(length__repeated=[start] * 5 + [now] * steps)) is not None

    assert repeated(0.0, 0.51)
    assert not repeated(0.0, 0.49) and not repeated(0.4, 0.55), "the task wants it"
    assert not repeated(0.0, 0.9, steps=2)


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ([0.0] * 20, "no completion earns anything"),
        ([0.8, *[1.0] * 20], "every completion earns the same"),
        ([0.6] * 30 + [0.0] * 20, "the reward was 0.6 and is gone"),
    ],
)
def test_saturated_groups_say_why(reward: list[float], cause: str) -> None:
    found = look("saturated", history_of(reward=reward, groups__saturated=[1.0] * len(reward)))
    assert found is not None and found.causes[0].startswith(cause)


def test_groups_are_saturated_where_99_in_100_are() -> None:
    assert look("saturated", history_of(groups__saturated=[0.98] * 20)) is None
    assert look("saturated", history_of(groups__saturated=[1.0] * 19)) is None


def test_truncated_is_more_than_at_the_start_or_of_no_use() -> None:
    def cut(start: float, now: float, **curves: list[float]) -> bool:
        return look("truncated", history_of(length__truncated=[start] * 5 + [now] * 5, **curves)) is not None

    assert cut(0.0, 0.26) and not cut(0.0, 0.24)
    assert not cut(1.0, 1.0) and not cut(0.2, 0.29), "by design"
    assert cut(1.0, 1.0, groups__saturated=[0.7] * 10), "and the answers earn little"
    assert not cut(1.0, 1.0, groups__saturated=[0.3] * 5 + [1.0] * 5), "they earn, and then all do"
    assert look("truncated", history_of(length__truncated=[0.9] * 4)) is None


def test_the_limit_is_not_blamed_where_the_reward_pays_for_length() -> None:
    curves = {"length": [10.0] * 10 + [20.0] * 10, "length__truncated": [0.0] * 10 + [0.9] * 10}
    grown = history_of(**curves, length__reward_correlation=[0.8] * 20)
    assert look("length-exploited", grown) is not None and look("truncated", grown) is None
    assert look("truncated", history_of(**curves, length__reward_correlation=[0.1] * 20)) is not None
