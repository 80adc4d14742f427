"""Rules over the KL: where each threshold lies, and what it must not mistake for a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnostics.histories import history_of, look, noisy

from klamp.diagnostics.history import RunSettings


def test_negative_k1_takes_twenty_steps_in_a_row() -> None:
    below = [-0.01] * 20
    assert look("negative-k1", history_of(k1=below)) is not None
    assert look("negative-k1", history_of(k1=below[1:])) is None
    assert look("negative-k1", history_of(k1=[*below[:10], 0.001, *below[10:]])) is None
    assert look("negative-k1", history_of(k1=[-0.9e-4] * 20)) is None


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_small_kl_is_not_negative_for_long(seed: int) -> None:
    history = history_of(k1=noisy(1e-4, 400, scale=0.005, seed=seed))
    assert not [view for view in history.replay() if look("negative-k1", view)]


def test_k3_far_above_k1() -> None:
    assert look("k3-far-above-k1", history_of(k1=[0.01] * 5, k3=[0.11] * 5)) is not None
    assert look("k3-far-above-k1", history_of(k1=[0.01] * 5, k3=[0.09] * 5)) is None
    assert look("k3-far-above-k1", history_of(k1=[-0.01] * 5, k3=[0.11] * 5)) is not None, "k1 in size"
    assert look("k3-far-above-k1", history_of(k1=[0.01] * 4, k3=[0.11] * 4)) is None, "fewer than five steps"
    assert look("k3-far-above-k1", history_of(k1=[0.0] * 5, k3=[0.049] * 5)) is None, "k1 may be 0 by noise"
    assert look("k3-far-above-k1", history_of(k1=[0.01] * 5, k3=[0.11] * 5, exact=[0.1] * 5)) is None
    assert look("k3-far-above-k1", history_of(k1=[0.003], k3=[1635.0])) is not None, "at once where it is extreme"
    assert look("k3-far-above-k1", history_of(k1=[0.003], k3=[0.9])) is None


def test_a_spike_is_three_times_the_steps_before() -> None:
    calm = [0.05, 0.07, 0.06, 0.08, 0.07]
    assert look("kl-spike", history_of(k3=[*calm, 0.241])) is not None
    assert look("kl-spike", history_of(k3=[*calm, 0.239])) is None
    assert look("kl-spike", history_of(k3=[*calm, 0.9, 1.0])) is None, "the step after it is no spike of its own"
    assert look("kl-spike", history_of(k3=[0.002] * 5 + [0.19])) is None, "a KL that is no warning sign"
    assert look("kl-spike", history_of(k3=[0.0, 0.5])) is None, "the first steps rise from nothing"
    assert look("kl-spike", history_of(k3=[0.0, 1.5])) is not None
    assert look("kl-spike", history_of(k3=[*calm, 0.5], exact=[*calm, 0.06])) is None, "exact says it was noise"


def test_completions_of_a_few_prompts_make_no_spike_below_a_nat() -> None:
    for last, prompts, rises in ((0.5, 15, False), (0.5, 16, True), (1.5, 1, True)):
        history = history_of(k3=[*[0.08] * 5, last], settings=RunSettings(prompts=prompts))
        assert (look("kl-spike", history) is not None) == rises
        history = history_of(k3=[*[0.08] * 5, last])
        history.rows[-1] = replace(history.rows[-1], prompts=prompts)
        assert (look("kl-spike", history) is not None) == rises


def test_growth_by_a_half_each_step_is_no_spike() -> None:
    history = history_of(k3=[0.001 * 1.5**i for i in range(20)])
    assert not [view for view in history.replay() if look("kl-spike", view)]


def test_a_reward_that_is_no_longer_logged_is_no_drop() -> None:
    history = history_of(exact=[*[0.0] * 13, 1.0], reward=[0.0] * 4)
    assert look("kl-spike", history) is not None and look("spike-with-reward-drop", history) is None


def test_a_spike_with_a_reward_drop() -> None:
    calm, reward = [0.03] * 10, noisy(0.6, 10, scale=0.02)
    assert look("spike-with-reward-drop", history_of(k3=[*calm, 0.5], reward=[*reward, 0.3])) is not None
    assert look("spike-with-reward-drop", history_of(k3=[*calm, 0.5], reward=[*reward, 0.59])) is None
    assert look("spike-with-reward-drop", history_of(k3=[*calm, 0.05], reward=[*reward, 0.3])) is None
    late = history_of(k3=[*calm, 0.5, 0.5, 0.5], reward=[*reward, 0.6, 0.2, 0.2])
    found = look("spike-with-reward-drop", late)
    assert found is not None and found.text.endswith("to 0.333")


def test_dilution_is_less_kl_per_token_over_longer_completions() -> None:
    short, long = noisy(10, 10, scale=0.2), noisy(14, 10, scale=0.2, seed=1)
    high, low = noisy(0.1, 10, scale=0.002), noisy(0.075, 10, scale=0.002, seed=1)
    found = look("dilution", history_of(exact=high + low, length=short + long))
    assert found is not None and "1.0" in found.text
    assert look("dilution", history_of(exact=high + high, length=short + long)) is None
    assert look("dilution", history_of(exact=high + low, length=short + short)) is None
    assert look("dilution", history_of(exact=low + high, length=long + short)) is None
    nearer = [x / 3 for x in low]
    assert look("dilution", history_of(exact=high + nearer, length=short + long)) is None, "it does come back"
    noise = [x + (-1) ** i * 0.09 for i, x in enumerate(high + low)]
    assert look("dilution", history_of(exact=noise, length=short + long)) is None
