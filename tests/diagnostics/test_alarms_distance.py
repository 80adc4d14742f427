"""Rules over the distance to the reference: at the start, on the way, and for what reward."""

from __future__ import annotations

import math

import pytest
import torch
from tests.diagnostics.histories import completion, history_of, look, noisy

from klamp.diagnostics.history import RunSettings


@pytest.mark.parametrize("name", ["k1", "k3", "exact"])
def test_step_zero(name: str) -> None:
    assert look("step-zero-kl", history_of(**{name: [1.1e-4]})) is not None
    assert look("step-zero-kl", history_of(**{name: [0.9e-4]})) is None
    assert look("step-zero-kl", history_of(**{name: [0.0, 0.5]})) is None, "the second step may have one"
    assert look("step-zero-kl", history_of(first=10, **{name: [0.5]})) is None, "ten steps averaged are not the first"
    assert look("step-zero-kl", history_of(settings=RunSettings(other_reference=True), **{name: [0.5]})) is None


def test_step_zero_leaves_a_mean_over_updates_alone() -> None:
    pooled = RunSettings(k3_over_updates=True)
    assert look("step-zero-kl", history_of(settings=pooled, k3=[0.5])) is None
    assert look("step-zero-kl", history_of(settings=pooled, k3=[0.5], k1=[0.9e-4])) is None
    found = look("step-zero-kl", history_of(settings=pooled, k3=[0.0], k1=[1.1e-4]))
    assert found is not None and "kl/k1 is 1.10e-04" in found.text


def test_step_zero_names_its_tokens() -> None:
    history = history_of(k3=[0.5])
    history.add_completions([completion(), completion(ref=(-1.0, -4.0, -0.4))])
    found = look("step-zero-kl", history)
    assert found is not None
    assert [(token.completion, token.position) for token in found.tokens] == [(1, 1), (1, 2)]


def moving(kl: float, *, reward: float = 0.8, length: float = 10.0, steps: int = 20, **settings: object) -> object:
    rewards = noisy(0.2, steps - 10, scale=0.01) + noisy(reward, 10, scale=0.01, seed=1)
    curves = {"k3": [kl] * steps, "length": [length] * steps, "reward": rewards}
    return look("detached-reference", history_of(settings=RunSettings(**settings), **curves))  # pyright: ignore


def test_a_reward_that_moves_proves_a_kl() -> None:
    least = 2 * (0.6 / 1.6) ** 2  # range: twice the largest mean reward
    assert moving(0.0) is not None
    assert moving(0.9 * 0.01 * least / 10) is not None
    assert moving(1.3 * 0.01 * least / 10) is None
    assert moving(0.0, reward=0.2) is None, "nothing moved"
    assert moving(0.0, steps=19) is None
    assert moving(0.0, beta=0.0) is None, "no KL holds it, and perhaps none was measured"
    assert moving(0.0, beta=0.01) is not None
    assert moving(0.0, moving_reference=True) is None, "the reference moves along"
    assert moving(0.0, other_reference=True) is None


def test_pinsker_holds_for_any_two_distributions() -> None:
    """The bound that the rule relies on: |E_p r - E_q r| <= range sqrt(KL(p||q) / 2)."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 2000, 6, dtype=torch.float64)
    p, q = logits.softmax(-1)
    reward = torch.rand(2000, 6, dtype=torch.float64)
    change = ((p - q) * reward).sum(-1).abs()
    kl = (p * (p.log() - q.log())).sum(-1)
    assert (kl >= 2 * (change / (reward.amax(-1) - reward.amin(-1))) ** 2).all()


def test_notes_on_how_far_the_policy_is() -> None:
    assert look("kl-high", history_of(k3=[0.21] * 5)) is not None
    assert look("kl-high", history_of(k3=[0.19] * 5)) is None
    assert look("kl-high", history_of(k3=[0.9] * 4)) is None
    low = look("kl-low", history_of(k3=[0.009] * 20))
    assert low is not None and low.text == "the KL is 0.009 nats per token"
    assert look("kl-low", history_of(k3=[0.009] * 19)) is None, "a run begins there"
    assert look("kl-low", history_of(k3=[0.011] * 20)) is None
    assert look("kl-low", history_of(k3=[math.nan] * 20)) is None


def test_a_chosen_reference_that_differs_is_named() -> None:
    chosen = RunSettings(other_reference=True)
    assert look("reference-differs", history_of(k3=[0.155], settings=chosen)) is not None
    assert look("reference-differs", history_of(k3=[0.019], settings=chosen)) is None
    assert look("reference-differs", history_of(k3=[0.155])) is None, "step-zero-kl is about that one"
    assert look("reference-differs", history_of(k3=[0.155] * 2, settings=chosen)) is None, "before the first update"
    assert look("reference-differs", history_of(first=7, k3=[0.155], settings=chosen)) is None, "the record begins late"


def test_far_is_a_nat_per_token_and_eight_per_completion() -> None:
    assert look("kl-far", history_of(k3=[1.1] * 5, length=[8.0] * 5)) is not None
    assert look("kl-far", history_of(k3=[0.9] * 5, length=[80.0] * 5)) is None
    assert look("kl-far", history_of(k3=[3.0] * 5, length=[2.0] * 5)) is None, "one right token may need that"
    assert look("kl-far", history_of(k3=[1.1] * 4, length=[8.0] * 4)) is None


def test_far_does_not_ask_how_it_got_there_but_names_the_learning_rate_where_it_jumped() -> None:
    slow = look("kl-far", history_of(k3=[0.05 * i for i in range(40)], length=[10.0] * 40))
    fast = look(
        "kl-far", history_of(k3=[0.0, 0.5, 1.0, 1.5, 2.0, 2.5], length=[10.0] * 6, train__learning_rate=[1e-2] * 6)
    )
    assert slow is not None and not any("learning rate" in cause for cause in slow.causes)
    assert fast is not None and fast.causes[0].startswith("the learning rate (up to 0.01)")


WIGGLE = [0.001 * (-1) ** i for i in range(30)]


def growing(reward: float, *, by: float = 1.5) -> bool:
    """Whether a KL that grows by this factor every 10 steps is an alarm, where the reward rises by so much in all."""
    kl = [0.1 * by ** (i // 10) + WIGGLE[i] for i in range(30)]
    rewards = [0.5 + reward * i / 29 + 10 * WIGGLE[i] for i in range(30)]
    return look("kl-growing", history_of(k3=kl, reward=rewards)) is not None


def test_a_kl_grows_for_nothing_where_the_reward_stands() -> None:
    assert growing(0.0) and growing(-0.2)
    assert not growing(0.3), "it is paid for"
    assert not growing(0.0, by=1.2)
    short = history_of(k3=[0.01 * i for i in range(29)], reward=[0.5] * 29)
    assert look("kl-growing", short) is None
