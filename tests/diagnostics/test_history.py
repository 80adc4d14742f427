"""What the rules ask of a run's history."""

import math

import pytest
from tests.diagnostics.histories import completion, history_of

from klamp.doctor.history import Row, RunSettings


def test_the_last_values_of_a_metric_skip_steps_without_it_and_the_kl_is_the_least_noisy_one() -> None:
    history = history_of(reward=[1, 2, 3, 4, 5])
    history.rows[3] = Row(step=4, metrics={})
    assert history.last("reward", 3) == [2, 3, 5]
    assert history.last("reward", 2, before=1) == [2, 3]
    assert history.last("reward", 99) == [1, 2, 3, 5]
    assert history.last("nothing", 3) == []
    assert history.first("reward", 4) == [1, 2, 3]
    assert history_of(k1=[1.0]).kl_name() == "kl/k1"
    assert history_of(k1=[1.0], k3=[1.0]).kl_name() == "kl/k3"
    assert history_of(k1=[1.0], k3=[1.0], exact=[1.0]).kl_name() == "kl/exact"
    assert history_of(reward=[1.0]).kl_name() == ""


@pytest.mark.parametrize(
    ("curves", "beta", "penalized"),
    [
        ({"k3": [0.1]}, None, True),  # TRL logs a KL only where beta is not 0
        ({"reward": [0.1]}, None, False),
        ({"k3": [0.1]}, 0.0, False),
        ({"k3": [0.1]}, 0.1, True),
        ({"k3": [0.1], "beta": [0.0]}, 0.1, False),
        ({"reward": [0.1], "beta": [0.2]}, None, True),
    ],
)
def test_whether_a_kl_holds_the_policy(curves: dict, beta: float | None, penalized: bool) -> None:
    assert history_of(settings=RunSettings(beta=beta), **curves).penalized is penalized


def test_log_ratios_are_of_trained_tokens_that_have_both() -> None:
    row = completion(
        policy=(-1.0, -2.0, math.nan), ref=(-1.5, -1.0, -0.5), sampler=(-1.2, -2.0, -0.5), trained=(True, False, True)
    )
    assert row.log_ratios() == [(0, 0.5)]
    assert row.log_ratios("sampler") == [(0, pytest.approx(-0.2))]
    assert completion(ref=None).log_ratios() == []


def test_a_replay_shows_the_run_as_it_grew_with_the_completions_that_rules_look_at() -> None:
    history = history_of(reward=[0.1, 0.2, 0.3])
    history.evaluations = [Row(step=step, metrics={"a": 1.0}) for step in (0, 2, 3)]
    history.add_completions([completion(2), completion(2), completion(3)])
    seen = [(len(view.rows), len(view.evaluations), view.step, len(view.completions)) for view in history.replay()]
    assert seen == [(0, 1, 0, 0), (1, 1, 1, 0), (2, 1, 2, 1), (2, 2, 2, 1), (3, 2, 3, 2), (3, 3, 3, 2)]
    history = history_of(reward=[0.1] * 9)
    history.add_completions(map(completion, range(1, 10)))
    *_, last = history.replay()
    assert list(last.completions) == [1, 7, 8, 9]
    assert len(history.completions) == 9
