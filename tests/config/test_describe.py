"""A KL in words, and its price."""

from typing import Any

import pytest

from klamp.config import KLConfig
from klamp.config.describe import describe_clip, describe_price
from klamp.config.loss import Price

HARD = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


@pytest.mark.parametrize(
    ("fields", "length", "text"),
    [
        ({}, None, "none"),
        (HARD, None, "hard clip at 0.1 nats per token of the reference length"),
        ({**HARD, "kl_reference_length": 50}, 30.0, "hard clip at 0.1 nats x 30 tokens"),
        (HARD, "the row's", "hard clip at 0.1 nats x the row's tokens"),
        ({**HARD, "use_per_token_kl_threshold": False}, 30.0, "hard clip at 0.1 nats per completion"),
    ],
)
def test_the_clip(fields: dict[str, Any], length: Any, text: str) -> None:
    """The length in force goes before the one that the configuration names."""
    assert describe_clip(KLConfig(**fields), length=length) == text


def test_a_price_in_words() -> None:
    assert describe_price(Price(beta=0.04), group_size=8) == "0.04 reward per nat of a whole completion"
    whole = describe_price(Price(beta=0.04, length_ratio=2.0, baseline_ratio=8 / 7), group_size=8)
    assert whole.startswith("0.0914 reward per nat of a whole completion = beta 0.04 x 2") and "x 1.14" in whole
    scaled = describe_price(Price(beta=0.04, scaled=True), group_size=8)
    assert scaled.endswith("no single number is the price: 0.0141 to 0.0214 for rewards of 0 and 1 in groups of 8")
