"""Every sentence of the rules over the KL, the reward and settings: a record for which it is printed and true, one near
to it for which it would be false. A new sentence without a record fails; the others: test_sentences_of_the_doctor.py.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnostics.histories import completion, history_of, look, noisy
from tests.diagnostics.sentences import Pair, holds, uncovered, valued, written

from klamp.diagnostics import alarms_kl, alarms_run
from klamp.diagnostics.causes import kl_pull
from klamp.diagnostics.history import History, RunSettings


def moving(steps: int = 20, **curves: Any) -> dict[str, Any]:
    """A run that is trained: rate, gradient, and what the test adds."""
    return {"train__learning_rate": [1e-6] * steps, "train__grad_norm": [0.3] * steps, **curves}


def surprised(share: float) -> tuple[dict[str, Any], list[float]]:
    """A completion of 400 tokens, so many of them .3 nats below the reference and the others .2 above it."""
    deltas = [-0.3 if i < share * 400 else 0.2 for i in range(400)]
    return {"tokens": ["a"] * 400, "policy": [-1.0] * 400, "ref": [-1.0 - delta for delta in deltas]}, deltas


def kept(**changes: Any) -> History:
    history = history_of(reward=[0.5] * 3)
    history.add_completions(completion(step, **changes) for step in (1, 2, 3))
    return history


def at(share: float, first: float = 0.0) -> list[float]:
    return [first] * 5 + [share] * 5


R = RunSettings
H: Any = history_of  # its curves are dictionaries here
ROW, ODD = surprised(0.7)
CALM = [0.05, 0.07, 0.06, 0.08, 0.07]
UP = [0.2 + 0.001 * (-1) ** i for i in range(10)] + [0.8 + 0.001 * (-1) ** i for i in range(10)]
SHORT, LONG = noisy(10, 10, scale=0.2), noisy(14, 10, scale=0.2, seed=1)
HIGH, LOW = noisy(0.1, 10, scale=0.002), noisy(0.075, 10, scale=0.002, seed=1)
LEAST = 2 * ((fmean(UP[15:]) - fmean(UP[:5])) / (2 * max(UP))) ** 2
STEEP = [0.2 * 2 ** (i // 10) + 0.001 * (-1) ** i for i in range(30)]
PRICED = {"beta": [0.1] * 20, "reward_std": [0.5] * 20, "kl__k3_sequence": [0.9] * 20}
RAN = {"beta": [0.1] + [3.5] * 9 + [3.2], "kl__k3_sequence": [2.0] * 11, "reward": [0.9] * 11}
CLIPPED = {"kl__over_budget": [0.0] * 20, "kl__budget": [2.5] * 20, "kl__before_clip": [0.13] * 20, "beta": [0.1] * 20}
EARNED = {"reward": [0.6] * 8 + [0.0], "length": [20.0] * 8 + [64.0], "length__truncated": [0.1] * 8 + [1.0]}
LOST = {"reward": UP[10:] * 2 + UP[:10], "reward_std": [0.3] * 30}
EQUAL = {"groups__saturated": [1.0] * 25}
SAME_REWARD = [{"reward": 1.0, "advantage": x, "group": "a"} for x in (0.5, -0.5)]
PAYS = {"length": [10.0] * 10 + [30.0 + 0.1 * (-1) ** i for i in range(10)], "length__reward_correlation": [0.5] * 20}
SEEN = "train/learning_rate is 1e-06, train/grad_norm is 0.3"
NAN = math.nan

PAIRS: list[Pair] = [
    # alarm, what it says, of this record, and not of that
    ("negative-k1", "kl/k1 is -0.25 nats per token in this step", H(k1=[0.0, -0.25]), H(k1=[0.0, -0.05])),
    ("negative-k1", "kl/k1 is -inf nats per token in this step", H(k1=[0.0, -math.inf]), H(k1=[0.0, -1e99])),
    (
        "negative-k1",
        "kl/k1_sequence is -15 nats per completion in this step",
        H(kl__k1_sequence=[-15.0]),
        H(kl__k1_sequence=[-13.0], k1=[-0.01]),
    ),
    (
        "negative-k1",
        "the last 20 values of kl/k1 are below 0, -0.01 nats on average",
        H(k1=[*[-0.015, -0.005] * 5, NAN, *[-0.015, -0.005] * 5]),
        H(k1=[*[-0.015, -0.005] * 5, 0.001, *[-0.015, -0.005] * 5]),
    ),
    (
        "negative-k1",
        f"k1 is {fmean(ODD):.3g} nats per token over 400 tokens, {-fmean(ODD) / (stdev(ODD) / 20):.3g} standard errors",
        written([ROW], k3=[0.0]),
        written([surprised(0.4)[0]], k3=[0.0]),
    ),
    (
        "k3-far-above-k1",
        "kl/k3 is 0.13 nats per token on average of the last 5, kl/k1 0.01, kl/exact 0.012",
        H(k1=[0.01] * 5, k3=[0.11, 0.15] * 2 + [0.13], exact=[0.012] * 5),
        H(k1=[0.01] * 5, k3=[0.11, 0.15] * 2 + [0.13], exact=[0.12] * 5),
    ),
    (
        "k3-far-above-k1",
        "kl/k3 is 1.64e+03 nats per token in this step, kl/k1 0.003",
        H(k1=[0.003], k3=[1635.0]),
        H(k1=[0.003], k3=[0.9]),
    ),
    (
        "kl-spike",
        "kl/k3 jumped to 0.5 nats per token, 0.08 was the highest of 20 before",  # of all it was 0.9
        H(k3=[0.9, *CALM * 4, 0.5]),
        H(k3=[*CALM, 0.2]),
    ),
    (
        "kl-spike",
        "kl/k1 jumped to 2 nats per token, -0.3 was the highest of 2 before",
        H(k1=[-0.4, -0.3, 2.0]),
        H(k1=[]),
    ),
    ("kl-spike", "0.06 the value after it", H(k3=[*CALM, 0.9, 0.06]), H(k3=[*CALM, 0.9, 0.88])),
    (
        "kl-spike",
        "the weights moved little",
        H(k3=[*CALM, 0.9, 0.06]),
        H(settings=R(moving_reference=True), k3=[*CALM, 0.9, 0.06]),  # that may have followed them
    ),
    ("kl-spike", "the weights moved little", H(k3=[*CALM, 0.9, 0.06]), H(k3=[*CALM, 0.9, 0.4])),  # half of it is left
    (
        "dilution",
        f"kl/exact went from {fmean(HIGH):.3g} to {fmean(LOW):.3g} nats per token while completions grew from "
        f"{fmean(SHORT):.3g} to {fmean(LONG):.3g} tokens (means of 10 values): the KL of a whole completion is about "
        f"{fmean(LOW) * fmean(LONG) / fmean(HIGH) / fmean(SHORT):.3g} times",
        H(exact=HIGH + LOW, length=SHORT + LONG),
        H(exact=HIGH + [x / 3 for x in LOW], length=SHORT + LONG),
    ),
    (
        "dilution",
        f"from {fmean(HIGH):.3g} to {fmean(LOW):.3g} nats",  # the lengths are of the steps that have a KL
        H(exact=[*HIGH, *[NAN] * 5, *LOW], length=[*SHORT, *[99.0] * 5, *LONG]),
        H(exact=HIGH + LOW, length=SHORT + SHORT),
    ),
    ("step-zero-kl", "kl/k3 is 2.00e-01 nats per token before the first update", H(k3=[0.2]), H(first=9, k3=[0.2])),
    (
        "reference-differs",
        "kl/k3 is 0.2 nats per token to the chosen reference, before the first update",
        H(settings=R(other_reference=True), k3=[0.2]),
        H(settings=R(other_reference=True), k3=[0.01]),
    ),
    (
        "detached-reference",
        f"the reward went from {fmean(UP[:5]):.3g} to {fmean(UP[15:]):.3g}, which takes at least "
        f"{LEAST:.3g} nats per completion on like prompts, if "
        "rewards differ by 1.6 at most; the KL is 1e-05 per token",
        H(k3=[1e-5] * 20, reward=UP),
        H(k3=[1e-5] * 20, reward=UP, length=[1000.0] * 20),
    ),
    (
        "detached-reference",
        f"the last 20 values of kl/k3 are exactly 0, {SEEN}",
        H(**moving(21, k3=[0.0] * 10 + [NAN] + [0.0] * 10)),
        H(**moving(k3=[0.0] * 19 + [1e-9])),
    ),
    ("detached-reference", "the reference follows the policy", H(**moving(k3=[0.0] * 20)), H(k3=[0.0] * 20)),
    (
        "detached-reference",
        "kl/k3 fell from 0.47 to 0 nats per token from one logged step to the next",
        H(k3=[0.3, 0.47, 0.0]),
        H(k3=[0.3, 0.47, 0.0], settings=R(moving_reference=True)),
    ),
    (
        "kl-far",
        "the KL is 1.5 nats per token, 15 per completion, mean of the last 5 but the largest",
        H(k3=[1.0, 2.0, 1.0, 2.0, 9.0], length=[10.0] * 5),
        H(k3=[0.5, 1.0, 0.5, 1.0, 9.0], length=[10.0] * 5),
    ),
    (
        "kl-growing",
        "kl/k3 grew from 0.2 to 0.8 nats per token, and the reward went from 0.5 to 0.5 (means of 10 values, 20 apart)",
        H(k3=STEEP, reward=[0.5 + 0.001 * (-1) ** i for i in range(30)]),
        H(k3=STEEP, reward=[0.02 * i for i in range(30)]),
    ),
    ("kl-high", "the KL is 0.25 nats per token, mean of the", H(k3=[0.25] * 4 + [0.9]), H(k3=[0.15] * 4 + [0.9])),
    ("kl-low", "the KL is 0.005 nats per token, mean of the", H(k3=[0.005] * 19 + [0.9]), H(k3=[0.05] * 20)),
    (
        "beta-runaway",
        "beta went from 0.1 to 3.47; the KL of a completion costs 1.2 of reward, and its reward is 0.9 in size (means",
        H(**RAN, beta__price=[0.6] * 11),
        H(**RAN, beta__price=[0.4] * 11),
    ),
    (
        "kl-inert",
        "in 20 steps no completion exceeded the clip's budget of 2.5 nats; their mean KL was 0.13: the KL is 0 in the",
        H(**CLIPPED, reward_std=[0.5] * 20),
        H(**CLIPPED, reward_std=[0.5] * 20, kl__after_clip=[0.04] * 20),  # a soft clip
    ),
    (
        "kl-inert",
        f"the KL pulls with {100 * 1e-4 * 1.8**0.5 / 0.5:.2g} % of the reward's strength, means of 20: 0.0001 of "
        "reward per nat of a completion, whose KL is 0.9 nats",
        H(**PRICED, beta__price=[1e-4] * 20),
        H(**PRICED, beta__price=[1e-2] * 20),
    ),
    (
        "kl-inert",
        f"{100 * 1e-4 * 1.0**0.5 / 0.5:.2g} % of the reward's strength, means of 20: 0.0001 of reward per nat of a "
        "completion, whose KL is 0.5 nats",  # the exact one, and not k3's
        H(**PRICED, beta__price=[1e-4] * 20, kl__exact_sequence=[0.5] * 20),
        H(**PRICED, beta__price=[1e-4] * 20),
    ),
    (
        "kl-dominates",
        "a nat of a completion costs 5 of reward, and rewards differ by 0.5 within their groups: the best policy is "
        "about 0.005 nats per completion from the reference, and earns about 0.05 more than it",
        H(**PRICED, beta__price=[5.0] * 20),
        H(**PRICED, beta__price=[5.0] * 20, kl__budget=[10.0] * 20),  # what a clip leaves free costs nothing
    ),
    (
        "kl-dominates",
        "a nat of a completion costs 5 of reward",
        H(**PRICED, beta__price=[5.0] * 20, kl__budget=[0.01] * 20),  # it leaves hardly anything
        H(**PRICED, beta__price=[2.0] * 20, kl__budget=[0.01] * 20),
    ),
    (
        "huge-values",
        "kl/k3 is 5.0e+03, train/loss is nan",
        H(k3=[5e3], train__loss=[NAN]),
        H(k3=[5.0], train__loss=[0.1]),
    ),
    (
        "huge-values",
        "1 trained token has no",
        written([{"ref": (-1.0, -math.inf, -0.5)}], reward=[0.5]),
        written([{}], reward=[0.5]),
    ),
    (
        "huge-values",
        "2 trained tokens have no finite log-probability",
        written([{"ref": (-math.inf, -math.inf, -0.5)}], reward=[0.5]),
        written([{"ref": (-math.inf, -math.inf, -0.5), "trained": (False, False, True)}], reward=[0.5]),
    ),
    (
        "huge-values",
        "this step's completions earn 0 (0.6 before) and all run to the limit (64 tokens)",
        H(**EARNED, train__loss=[0.1] * 8 + [NAN]),
        H(**{**EARNED, "reward": [0.6] * 7 + [0.0]}, train__loss=[0.1] * 8 + [NAN]),  # the 0 is of the step before
    ),
    (
        "not-trained",
        "no token of the last 3 completions that were kept is trained on",
        kept(trained=(False,) * 3, ended=True),
        kept(trained=(False, True, True)),
    ),
    (
        "not-trained",
        "the loss mask is empty",
        kept(trained=(False,) * 3),  # who knows how they end
        kept(trained=(False,) * 3, ended=False),
    ),
    (
        "not-trained",
        "every completion is cut at the length limit, and cut ones are masked",
        H(train__grad_norm=[0.0] * 5, length__truncated=[1.0] * 5),
        H(train__grad_norm=[0.0] * 5, length__truncated=[0.9] * 5),
    ),
    (
        "not-trained",
        "train/learning_rate is 0 in all 5 steps",
        H(train__learning_rate=[0.0] * 5, train__grad_norm=[0.3] * 5, k3=[0.0] * 5),
        H(train__learning_rate=[0.0] * 5, train__grad_norm=[0.3] * 5, k3=[0.0, 1e-6, 5e-6, 2e-5, 4e-5]),  # rounded
    ),
    ("not-trained", "or the log rounds it to 0", H(train__learning_rate=[0.0] * 20), H(train__learning_rate=[0.0] * 4)),
    (
        "not-trained",
        "train/grad_norm is 0 in its last 20 values, train/loss is 0, kl/k3 is 0",
        H(train__grad_norm=[0.3] * 5 + [0.0] * 20, k3=[0.0] * 25, train__loss=[0.0] * 25),
        H(train__grad_norm=[0.3] * 6 + [0.0] * 19, k3=[0.0] * 25, train__loss=[0.0] * 25),
    ),
    (
        "not-trained",
        "frozen weights, an adapter",
        H(train__grad_norm=[0.0] * 5),
        H(train__grad_norm=[0.0] * 5, **EQUAL),
    ),
    ("advantage-scale", "an advantage of 40", H(advantage__max=[40.0]), H(advantage__max=[4.0])),
    (
        "advantage-scale",
        "rewards of about 1 differ by 0.0002 within their groups and are divided by that",
        H(settings=R(scale_rewards="std"), reward=[1.0], reward_std=[1e-4], groups__saturated=[0.5]),
        H(settings=R(scale_rewards="none"), reward=[1.0], reward_std=[1e-4], groups__saturated=[0.5]),
    ),
    (
        "advantage-scale",
        "within their groups and may be divided by that",
        H(reward=[1.0], reward_std=[1e-4], groups__saturated=[0.5]),
        H(settings=R(scale_rewards="std"), reward=[1.0], reward_std=[1e-4], groups__saturated=[0.5]),
    ),
    (
        "advantage-scale",
        "2 completions of one prompt have the same reward 1 and advantages from -0.5 to 0.5",
        written(SAME_REWARD, reward=[1.0]),
        written(SAME_REWARD, told=R(kl_in_reward=True), reward=[1.0]),
    ),
    (
        "dr-grpo-with-kl",
        "loss_type is dr_grpo, beta is 0.04, the reward is a rule's",
        H(settings=R(loss_type="dr_grpo", verifier="rules", beta=0.04), k3=[0.0]),
        H(settings=R(loss_type="dr_grpo", verifier="rules", beta=0.0), k3=[0.0]),
    ),
    (
        "dr-grpo-with-kl",
        "loss_type is dr_grpo, a KL is logged, the reward is a rule's",
        H(settings=R(loss_type="dr_grpo", verifier="rules"), k3=[0.0]),
        H(settings=R(loss_type="dr_grpo", verifier="rules"), reward=[0.0]),
    ),
    (
        "retention",
        "chat went from 90.0 of 100 to 50.0 of 100; old went from 80.0 of 100 to 60.0 of 100",
        valued({"chat": 0.9, "old": 0.8}, {"chat": 0.5, "old": 0.6}, eval_size=1000),
        valued({"chat": 0.9, "old": 0.8}, {"chat": 0.5, "old": 0.6}, eval_size=4),
    ),
    (
        "reward-collapse",
        f"the reward fell from {fmean(UP[10:15]):.3g} to {fmean(UP[5:10]):.3g}, means of 5 steps",
        H(**LOST),
        H(**LOST | {"reward": UP[10:] * 3}),
    ),
    (
        "length-exploited",
        "completions grew from 10 to 30 tokens, and within groups the longer ones earn more (correlation 0.50 over 10",
        H(**PAYS),
        H(**PAYS | {"length__reward_correlation": [0.2] * 20}),
    ),
    (
        "repetition",
        "90 % of the tokens stand in a pair that was in their completion before, 10 % in the first steps; the entropy "
        "went from 2 to 0.1",
        H(length__repeated=at(0.9, 0.1), policy__entropy=at(0.1, 2.0)),
        H(length__repeated=at(0.9, 0.8), policy__entropy=at(0.1, 2.0)),
    ),
    (
        "saturated",
        "99.5 % of the groups of 20 steps have equal rewards at 1, the entropy is 0.01 nats per token",
        H(groups__saturated=[0.99, 1.0] * 10, reward=[1.0] * 20, policy__entropy=[0.01] * 20),
        H(groups__saturated=[0.97, 1.0] * 10, reward=[1.0] * 20, policy__entropy=[0.01] * 20),
    ),
    ("saturated", "the reward was 1 once", H(**EQUAL, reward=[1.0] * 5 + [0.6] * 20), H(**EQUAL, reward=[0.7] * 25)),
    ("saturated", "no completion earns anything", H(**EQUAL, reward=[0.0] * 25), H(**EQUAL, reward=[0.5] * 25)),
    (
        "saturated",
        "completions of a prompt earn the same",
        H(**EQUAL, reward=[0.5] * 25),
        H(**EQUAL, reward=[0.0] * 25),
    ),
    (
        "truncated",
        "80 % of the completions were cut at the length limit, mean of 5, 10 % in the first",
        H(length__truncated=at(0.8, 0.1)),
        H(length__truncated=at(0.8, 0.75)),
    ),
    (
        "truncated",
        "mean of 5, as from the start, where 70 % of the groups had equal rewards",
        H(length__truncated=[0.9] * 5, groups__saturated=[0.7] * 5),
        H(length__truncated=[0.9] * 5, groups__saturated=[0.5] * 5),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}: {pair[1][:40]}")
def test_a_sentence_is_printed_where_it_is_true_and_not_beside_that(pair: Pair) -> None:
    holds(pair)


@pytest.mark.parametrize("module", [alarms_kl, alarms_run])
def test_no_sentence_is_without_a_record(module: Any) -> None:
    assert uncovered(module, PAIRS) == []


# --- the numbers in them, computed anew -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(0, 1), min_size=2, max_size=6), seed=st.integers(0, 10**6))
def test_no_policy_pays_less_than_a_reward_that_changed_is_said_to_take(rewards: list[float], seed: int) -> None:
    """Pinsker's bound, over drawn policies: what it "takes at least" is below the KL of each that has that reward."""
    draw = torch.randn(2, len(rewards), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    new, old = draw.softmax(-1)
    values = torch.tensor(rewards, dtype=torch.float64)
    before, now = float(old @ values), float(new @ values)
    kl = float((new * (new / old).log()).sum())
    found = look("detached-reference", H(k3=[0.0] * 20, reward=[before] * 10 + [now] * 10))
    if found is not None and "takes at least" in found.text:
        assert float(found.text.split("at least ")[1].split()[0]) <= kl * 1.01 + 1e-12


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0.05, 0.95), ratio=st.floats(0.02, 0.19))
def test_the_best_policy_at_a_price_is_where_it_is_said_to_be(share: float, ratio: float) -> None:
    """Of right and wrong answers the optimum ref exp(r / price) is enumerated: its KL and what it earns more."""
    spread = (share * (1 - share)) ** 0.5
    price = spread / ratio
    tilted = share * math.exp(1 / price) / (share * math.exp(1 / price) + 1 - share)
    kl = tilted * math.log(tilted / share) + (1 - tilted) * math.log((1 - tilted) / (1 - share))
    found = look("kl-dominates", H(beta=[0.1] * 10, beta__price=[price] * 10, reward_std=[spread] * 10))
    assert found is not None
    told, more = (float(found.text.split(word)[1].split()[0]) for word in ("policy is about ", "earns about "))
    assert told == pytest.approx(kl, rel=0.6) and more == pytest.approx(tilted - share, rel=0.6)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0.1, 0.9), tilt=st.floats(0.01, 0.3))
def test_at_the_optimum_the_kl_pulls_with_all_of_the_rewards_strength(share: float, tilt: float) -> None:
    spread = (share * (1 - share)) ** 0.5
    new = share * math.exp(tilt) / (share * math.exp(tilt) + 1 - share)
    kl = new * math.log(new / share) + (1 - new) * math.log((1 - new) / (1 - share))
    history = H(beta__price=[1 / tilt] * 5, reward_std=[spread] * 5, kl__exact_sequence=[kl] * 5)
    assert kl_pull(history, 5) == pytest.approx(1, rel=0.2)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-0.09, -0.02), min_size=8, max_size=40))
def test_a_mean_of_values_below_0_is_of_those_that_are_counted(values: list[float]) -> None:
    found = look("negative-k1", H(k1=[0.01, *values]))
    if found is not None:
        count = min(len(values), 20)
        told, mean = found.text.split(", ")
        assert told == f"the last {count} values of kl/k1 are below 0"
        assert float(mean.split()[0]) == pytest.approx(sum(values[-count:]) / count, rel=0.006)
