"""Which completions come first, and which tokens are the worst."""

import math
from typing import Any

import pytest
from tests.report.pages import completion, run_of

from klamp.report.tokens import LONGEST, ranked, worst_tokens


def ref(size: float) -> dict[str, Any]:
    return {"ref": (-1.0, -2.0 - size, -0.5)}


def test_the_worst_comes_first() -> None:
    runs = [
        run_of(completions=[completion(step=1, **ref(0.5)), completion(step=2, **ref(-2.0))]),
        run_of(completions=[completion(step=1, **ref(1.0))]),
    ]
    shown = ranked(runs)
    assert [(each.run, each.completion.step, each.worst) for each in shown] == [(0, 2, 2.0), (1, 1, 1.0), (0, 1, 0.5)]


def test_what_an_alarm_blames_comes_before_everything() -> None:
    steps = [completion(step=s, **ref(0.5)) for s in range(1, 7)] + [completion(step=7, **ref(3.0))]
    far = completion(step=3, policy=(-1.0, -9.0, -0.5), ref=(-1.0, -2.0, -0.5), trained=(True, False, True))
    run = run_of(completions=[*steps, far], k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7])
    first = ranked([run])[0]
    assert (first.completion.step, first.blamed) == (7, frozenset({1}))


def test_twins_are_one() -> None:
    rows = [completion(**ref(0.5)), completion(**ref(0.6)), completion(**ref(0.5)), completion(**ref(0.5), reward=1.0)]
    assert [(each.index, each.times) for each in ranked([run_of(completions=rows)])] == [(1, 1), (0, 2), (3, 1)]


def test_sums_are_over_trained_tokens() -> None:
    row = completion(policy=(-1.0, -2.0, -0.5), ref=(-1.5, -5.0, math.nan), trained=(True, False, True))
    (shown,) = ranked([run_of(completions=[row])])
    assert (shown.against, shown.worst, shown.k1) == ("reference", 0.5, 0.5)
    assert shown.k3 == pytest.approx(math.exp(-0.5) - 0.5)
    assert shown.ratios[0] == 0.5 and math.isnan(shown.ratios[1]) and math.isnan(shown.ratios[2])


def test_without_a_reference_the_sampler_is_compared_with() -> None:
    (shown,) = ranked([run_of(completions=[completion(ref=None, sampler=(-1.0, -2.5, -0.5))])])
    assert (shown.against, shown.worst) == ("sampler", 0.5)
    (alone,) = ranked([run_of(completions=[completion(ref=None)])])
    assert (alone.against, alone.worst, alone.k1) == (None, 0.0, 0)


def test_worst_tokens_each_once() -> None:
    rows = [
        completion(**ref(-1.0)),
        completion(**ref(-1.0)),
        completion(**ref(-1.0), reward=0.5),
        completion(step=2, policy=(-1.0, -2.0, -0.5), ref=(-1.0, -2.25, -3.0)),
    ]
    found = worst_tokens(dict(enumerate(ranked([run_of(completions=rows)]))), most=2)
    assert found == [(0, 2), (1, 1)]


def test_of_a_long_completion_the_worst_stretch_is_shown() -> None:
    n = 3 * LONGEST
    deltas = [0.0] * n
    deltas[2 * LONGEST] = 4.0
    row = completion(tokens=["a"] * n, policy=[-1.0] * n, ref=[-1.0 - d for d in deltas])
    (shown,) = ranked([run_of(completions=[row])])
    begin, end = shown.span
    assert end - begin == LONGEST and begin < 2 * LONGEST < end
    deltas[2 * LONGEST] = 0.0
    (flat,) = ranked([run_of(completions=[completion(tokens=["a"] * n, policy=[-1.0] * n, ref=[-1.0] * n)])])
    assert flat.span == (0, LONGEST)


def test_the_k3_of_a_card_is_that_of_the_kl_from_the_one_that_drew_the_tokens() -> None:
    policy, other = (-1.0, -2.0, -0.5), (-1.0, -2.5, -0.5)
    (drawn,) = ranked([run_of(completions=[completion(policy=policy, ref=None, sampler=other)])])
    (held,) = ranked([run_of(completions=[completion(policy=policy, ref=other)])])
    assert drawn.k3 == pytest.approx(math.exp(0.5) - 1 - 0.5), "as sampler/k3 is: tokens of the sampler"
    assert held.k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5), "as kl/k3 is: tokens of the policy"
