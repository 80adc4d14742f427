"""Rules over the strength of the KL against the reward: where each threshold lies, and the theory behind them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.diagnostics.histories import history_of, look

from klamp.diagnostics.alarms_kl import DOMINATES
from klamp.diagnostics.causes import kl_pull
from klamp.diagnostics.history import RunSettings


def test_a_beta_that_ran_away() -> None:
    curves = {"beta": [0.0, *[0.1] * 10, *[3.0] * 10], "kl__k3_sequence": [2.0] * 21, "reward": [0.9] * 21}

    def raised(price: float, **changes: list[float]) -> bool:
        history = history_of(**{**curves, "beta__price": [price] * 21, **changes})
        return look("beta-runaway", history) is not None

    assert raised(0.46) and not raised(0.44), "0.92 and 0.88 against a reward of 0.9"
    assert not raised(0.46, beta=[0.0, *[0.1] * 10, *[2.9] * 10]), "29 times"
    assert not raised(0.46, reward=[-0.95] * 21), "the size of the reward counts"
    assert not raised(0.46, beta=[0.0] * 21)
    assert not raised(0.46, beta=[0.1, *[3.0] * 8])


def priced(name: str, steps: int = 20, settings: RunSettings | None = None, **values: float) -> bool:
    """Whether a run whose metrics stand still raises an alarm; otherwise beta .01, price .01, spread .3, KL 1 nat."""
    curves: dict[str, Any] = {
        "beta": [0.01] * steps,
        "beta__price": [values.get("price", 0.01)] * steps,
        "reward_std": [values.get("spread", 0.3)] * steps,
        "groups__saturated": [values.get("saturated", 0.0)] * steps,
        "kl__k3_sequence": [values.get("kl", 1.0)] * steps,
    }
    return look(name, history_of(settings=settings, **curves)) is not None


def test_an_inert_kl_pulls_with_half_a_hundredth_of_the_rewards_strength() -> None:
    limit = 0.005 * 0.3 / math.sqrt(2)
    assert priced("kl-inert", price=0.99 * limit) and not priced("kl-inert", price=1.01 * limit)
    assert not priced("kl-inert", price=1e-6, kl=0.04), "nothing to hold yet"
    assert not priced("kl-inert", price=1e-6, steps=19)
    assert not priced("kl-inert", price=1e-6, settings=RunSettings(target_kl=0.05)), "a controller lowered beta"
    assert not priced("kl-inert", price=1e-6, saturated=1.0), "no group says how strong the reward is"


def test_a_clip_that_never_opens_is_inert() -> None:
    def run(over: list[float], **settings: Any) -> bool:
        return look("kl-inert", history_of(kl__over_budget=over, beta=[0.1] * len(over), **settings)) is not None

    assert run([0.0] * 20)
    assert not run([0.0] * 19 + [0.01]) and not run([0.0] * 19)


def test_a_kl_dominates_where_the_optimum_is_at_the_reference() -> None:
    limit = 0.3 / math.sqrt(2 * DOMINATES.value)
    assert priced("kl-dominates", price=1.01 * limit) and not priced("kl-dominates", price=0.99 * limit)
    assert not priced("kl-dominates", price=50.0, steps=9)
    assert priced("kl-dominates", price=1.01 * limit, spread=0.15, saturated=0.5), "the spread of those that have one"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_to_second_order_the_optimum_is_where_the_rules_have_it(seed: int) -> None:
    """ref exp(r / p) has a KL of (s / p)^2 / 2, and earns s^2 / p more, where p is far above s."""
    generator = torch.Generator().manual_seed(seed)
    ref = torch.rand(50, generator=generator, dtype=torch.float64)
    ref, reward = ref / ref.sum(), torch.rand(50, generator=generator, dtype=torch.float64)
    s = ((ref * reward.square()).sum() - (ref * reward).sum().square()).sqrt()
    price = 30 * s
    optimum = ref * (reward / price).exp()
    optimum = optimum / optimum.sum()
    kl = (optimum * (optimum / ref).log()).sum()
    assert float(kl) == pytest.approx(float((s / price).square() / 2), rel=0.05)
    assert float(((optimum - ref) * reward).sum()) == pytest.approx(float(s.square() / price), rel=0.05)
    numbers = {"beta__price": [float(price)], "reward_std": [float(s)], "kl__k3_sequence": [float(kl)]}
    assert kl_pull(history_of(**numbers), 1) == pytest.approx(1, rel=0.05), "at the optimum the two pull alike"
