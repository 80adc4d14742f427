"""A KL in words, and its price."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from tests.config.test_kl import quiet

from klamp.config import KLConfig, preset
from klamp.config.describe import (
    DIVERGENCES,
    PLACEMENTS,
    describe_average,
    describe_clip,
    describe_controller,
    describe_gradient,
    describe_kl,
    describe_movement,
    describe_price,
    describe_value,
)
from klamp.config.loss import Price
from klamp.core.term import Placement
from klamp.core.types import Gradient, Reduction

HARD = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


@pytest.mark.parametrize(
    ("kl", "text"),
    [
        (KLConfig(), "k3, gradient reverse per token, in the loss"),
        (preset("ppo"), "k1, gradient reverse over the sequence, taken from the reward"),
        (preset("frpo"), "k1, gradient reverse over the sequence, taken from the advantage"),
        (KLConfig(kl_max_log_ratio=5.0), "k3, log-ratio bounded at 5, gradient reverse per token, in the loss"),
        (
            KLConfig(**HARD, kl_reference_length=50),
            "k3, gradient reverse per token, in the loss; hard clip at 0.1 nats x 50 tokens",
        ),
        (KLConfig(beta=0), "none: beta is 0"),
        (KLConfig(beta=0, kl_monitor=True), "measured and logged only: beta is 0"),
    ],
)
def test_the_kl_in_a_line(kl: KLConfig, text: str) -> None:
    assert describe_kl(kl) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kl_gradient": "forward"}, "forward per token"),
        ({"kl_horizon": "sequence"}, "reverse over the sequence"),
        ({"kl_off_policy": "token"}, "reverse per token, off-policy weight per token"),
        ({"kl_off_policy": "token", "kl_max_weight": 3.0}, "reverse per token, off-policy weight per token up to 3"),
        (
            {"kl_off_policy": "sequence", "kl_horizon": "sequence"},
            "reverse over the sequence, off-policy weight of the prefix",
        ),
        ({"kl_max_weight": 3.0}, "reverse per token"),
    ],
)
def test_the_gradient(fields: dict[str, Any], text: str) -> None:
    assert describe_gradient(quiet(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "length", "text"),
    [
        ({}, None, "none"),
        (HARD, None, "hard clip at 0.1 nats per token of the reference length"),
        (HARD, 30.0, "hard clip at 0.1 nats x 30 tokens"),
        ({**HARD, "kl_reference_length": 50}, None, "hard clip at 0.1 nats x 50 tokens"),
        ({**HARD, "kl_reference_length": 50}, 30.0, "hard clip at 0.1 nats x 30 tokens"),
        (HARD, "the row's", "hard clip at 0.1 nats x the row's tokens"),
        ({**HARD, "use_per_token_kl_threshold": False}, 30.0, "hard clip at 0.1 nats per completion"),
        ({"kl_clip_method": "soft"}, None, "soft clip at 0.5 nats per token of the reference length"),
    ],
)
def test_the_clip(fields: dict[str, Any], length: Any, text: str) -> None:
    """The length in force goes before the one that the configuration names."""
    assert describe_clip(KLConfig(**fields), length=length) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "fixed at 0.01"),
        ({"target_kl": 0.05}, "hold controller from 0.01, towards 0.05 nats per token"),
        ({"kl_schedule": "linear"}, "fixed at 0.01; schedule linear, 0 steps of warm-up"),
        ({"kl_warmup_steps": 9}, "fixed at 0.01; schedule constant, 9 steps of warm-up"),
    ],
)
def test_the_controller(fields: dict[str, Any], text: str) -> None:
    assert describe_controller(quiet(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"reference": "frozen"}, ""),
        ({"reference": "ema", "reference_decay": 0.9}, "follows the policy, keeping 0.9 of itself at every step"),
        ({"reference": "periodic", "reference_reset_steps": 7}, "becomes the policy every 7 steps"),
    ],
)
def test_how_the_reference_moves(fields: dict[str, Any], text: str) -> None:
    assert describe_movement(KLConfig(**fields)) == text


def test_there_are_words_for_every_choice() -> None:
    assert set(PLACEMENTS) == set(get_args(Placement)) and set(DIVERGENCES) == set(get_args(Gradient))
    averages = [describe_average(each) for each in get_args(Reduction)]
    assert len(set(averages)) == len(averages)
    assert describe_average("token_mean", over="the call") == "mean over the tokens of the call"
    assert describe_average("fixed_length", length="16") == "sum over tokens / (completions * 16)"
    assert describe_value(KLConfig(kl_estimator="exact")) == "exact"


def test_a_price_in_words() -> None:
    assert describe_price(Price(beta=0.04), group_size=8) == "0.04 reward per nat of a whole completion"
    whole = describe_price(Price(beta=0.04, length_ratio=2.0, baseline_ratio=8 / 7), group_size=8)
    assert whole.startswith("0.0914 reward per nat of a whole completion = beta 0.04 x 2 (the policy loss is divided")
    assert whole.endswith(" x 1.14 (the mean of 8 holds the own reward)")
    fewer = describe_price(Price(beta=0.04, length_ratio=0.5), group_size=8)
    assert "divided by more tokens than the KL" in whole and "divided by fewer tokens than the KL" in fewer
    of_batch = describe_price(Price(beta=0.04, scaled=True), group_size=8, of_batch=True)
    assert of_batch == "0.04 x the standard deviation of the batch's rewards per nat of a whole completion"
    scaled = describe_price(Price(beta=0.04, scaled=True), group_size=8)
    assert scaled == (
        "0.04 x the standard deviation of a group's rewards per nat of a whole completion; no single number is the "
        "price: 0.0141 to 0.0214 for rewards of 0 and 1 in groups of 8"
    )
