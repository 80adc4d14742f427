"""What a coefficient costs under a configuration of verl."""

from __future__ import annotations

from typing import Any

import pytest

from klamp.config.loss import Price
from klamp.hosts.verl.pricing import divides_by_std, price


def config(estimator: str = "grpo", size: int = 8, mode: str = "vanilla", **algorithm: Any) -> dict[str, Any]:
    return {
        "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode}}, "rollout": {"n": size}},
        "algorithm": {"adv_estimator": estimator, **algorithm},
    }


@pytest.mark.parametrize(
    ("of", "placement", "expected"),
    [
        (config(), "loss", Price(beta=0.1, baseline_ratio=8 / 7, scaled=True)),
        (config(norm_adv_by_std_in_grpo=False), "loss", Price(beta=0.1, baseline_ratio=8 / 7)),
        (config("rloo"), "loss", Price(beta=0.1)),
        (config("rloo", mode="klamp"), "reward", Price(beta=0.1)),
        (config("rloo", mode="klamp:vanilla"), "loss", Price(beta=0.1)),
        (config("gae"), "loss", "adv_estimator=gae"),
        (config(size=1), "loss", "rollout.n=1"),
        (config(mode="klamp:gspo"), "loss", "loss_mode=gspo"),
    ],
)
def test_the_price_or_why_there_is_none(of: Any, placement: Any, expected: Price | str) -> None:
    found = price(of, 0.1, placement)
    assert found == expected if isinstance(expected, Price) else expected in str(found)


def test_only_grpo_divides_and_by_default() -> None:
    assert divides_by_std({"adv_estimator": "grpo"})
    assert not divides_by_std({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False})
    assert not divides_by_std({"adv_estimator": "rloo"})
