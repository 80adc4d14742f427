"""What a run shows of why: each cause where its number is there, the likeliest first."""

from __future__ import annotations

import pytest
from tests.diagnostics.histories import history_of

from klamp.diagnostics import causes
from klamp.diagnostics.history import History

LOST = history_of(
    k3=[0.0, 0.6],
    beta=[1e-3] * 2,
    beta__price=[1e-3] * 2,
    reward_std=[0.4] * 2,
    kl__k3_sequence=[0.0, 3.0],
    length__reward_correlation=[0.9] * 2,
    length__repeated=[0.9] * 2,
    sampler__k3=[0.02] * 2,
    train__learning_rate=[0.0, 0.3],
)
EVERY = (causes.learning_rate, causes.weak_kl, causes.pays_for_length, causes.repeats, causes.stale_sampler)


def test_the_likeliest_comes_first() -> None:
    found = causes.likely_causes(LOST, *EVERY)
    assert len(found) == len(EVERY)
    assert found[0] == (
        "the learning rate (up to 0.3): one step moved the policy by 0.6 nats per token. Take a tenth of it, or set "
        "kl_lr_guard"
    )
    assert causes.likely_causes(LOST) == [], "only what was asked for"


@pytest.mark.parametrize("cause", EVERY)
def test_a_run_that_shows_nothing_names_nothing(cause: causes.Cause) -> None:
    calm = history_of(k3=[0.0, 0.01], beta=[0.1] * 2, length__reward_correlation=[0.1] * 2, sampler__k3=[1e-3] * 2)
    assert cause(calm) is None


def test_without_a_beta_there_is_no_kl_to_be_weak() -> None:
    assert causes.likely_causes(history_of(k3=[0.1], beta=[0.0]), causes.weak_kl)[0].startswith(
        "no KL holds the policy"
    )
    assert causes.weak_kl(History()) is not None


def test_groups_without_a_spread_are_left_out_of_it() -> None:
    history = history_of(reward_std=[0.2, 0.0, 0.3], groups__saturated=[0.5, 1.0, 0.0])
    assert causes.spread_within_groups(history, 3) == pytest.approx((0.4 + 0.3) / 2)
    assert causes.spread_within_groups(history_of(reward=[1.0]), 3) is None
