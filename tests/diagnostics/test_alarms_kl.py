"""Rules over the KL: its estimates, its jumps, the distance to the reference, and its strength against the reward."""

import math
from dataclasses import replace

import pytest
import torch
from tests.diagnostics.histories import history_of, look, noisy

from klamp.doctor.alarms_kl import share_in_band
from klamp.doctor.causes import learning_rate
from klamp.doctor.examine import examine
from klamp.doctor.history import History, RunSettings


def test_negative_k1_takes_twenty_steps_in_a_row() -> None:
    below = [-0.01] * 20
    assert look("negative-k1", history_of(k1=below)) is not None
    apart = [-0.01 - 0.009 * (-1) ** i for i in range(20)]
    assert look("negative-k1", history_of(k1=apart)) is not None
    assert look("negative-k1", history_of(k1=apart[1:])) is None, "by their own scatter they may be"
    assert look("negative-k1", history_of(k1=[*apart[:10], 0.001, *apart[10:]])) is None
    assert look("negative-k1", history_of(k1=[-0.9e-4] * 20)) is None
    assert look("negative-k1", history_of(k1=[0.0, -0.11])) is not None, "at once: 140 tokens, one in a million"
    assert look("negative-k1", history_of(k1=[0.0, -0.09])) is None


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
    assert look("kl-spike", history_of(k3=[*calm, 0.9, 1.0])) is not None, "it stays"
    assert look("kl-spike", history_of(k3=[*calm, 0.9, 1.0, 1.1])) is None, "the steps after it are no spike"
    wild = [0.01, 0.09, 0.02, 0.08, 0.01, 0.06]
    assert look("kl-spike", history_of(k3=[*wild, 0.9])) is None, "of few samples one token does that"
    assert look("kl-spike", history_of(k3=[*wild, 0.9, 0.7])) is not None
    assert look("kl-spike", history_of(exact=[*wild, 0.9])) is not None, "nothing is sampled of it but the prompts"
    assert look("kl-spike", history_of(k3=[0.002] * 5 + [0.19])) is None, "a KL that is no warning sign"
    assert look("kl-spike", history_of(k3=[0.0, 0.5])) is None, "the first steps rise from nothing"
    assert look("kl-spike", history_of(k3=[0.0, 1.5])) is not None
    assert look("kl-spike", history_of(k1=[0.05, -0.3, 0.06, 0.07, 0.05, 0.6, 0.7])) is None, "k1 jumps both ways"
    assert look("kl-spike", history_of(k1=[-0.01, -0.05, -0.01, -0.06, -0.01, 0.05, 0.25])) is None
    assert look("kl-spike", history_of(k3=[*calm, 0.5], exact=[*calm, 0.06])) is None, "exact says it was noise"


def test_completions_of_a_few_prompts_make_no_spike_below_a_nat() -> None:
    for last, prompts, rises in ((0.5, 15, False), (0.5, 16, True), (1.5, 1, True)):
        history = history_of(k3=[*[0.08] * 5, last], settings=RunSettings(prompts=prompts))
        assert (look("kl-spike", history) is not None) == rises
        history = history_of(k3=[*[0.08] * 5, last])
        history.rows[-1] = replace(history.rows[-1], prompts=prompts)
        assert (look("kl-spike", history) is not None) == rises


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
    evidence = look("step-zero-kl", history_of(settings=pooled, k3=[0.0], k1=[1.1e-4]))
    assert evidence is not None and "kl/k1 is 1.10e-04" in evidence.text


def moving(kl: float, *, reward: float = 0.8, length: float = 10.0, steps: int = 20, **settings: object) -> object:
    rewards = noisy(0.2, steps - 10, scale=0.01) + noisy(reward, 10, scale=0.01, seed=1)
    curves = {"k3": [kl] * steps, "length": [length] * steps, "reward": rewards}
    return look("detached-reference", history_of(settings=RunSettings(**settings), **curves))  # pyright: ignore


def test_a_reward_that_moves_proves_a_kl() -> None:
    least = 2 * (0.6 / 1.6) ** 2  # range: twice the largest mean reward
    assert moving(0.0) is not None
    assert moving(0.9 * 0.01 * least / 10) is not None
    assert moving(1.3 * 0.01 * least / 10) is None
    assert moving(1e-9, reward=0.2) is None, "nothing moved"
    assert moving(-0.1) is None, "a mean of k1 that far below 0 is not near to 0"
    assert moving(0.0, steps=19) is None
    assert moving(0.0, beta=0.0) is None, "no KL holds it, and perhaps none was measured"
    assert moving(0.0, beta=0.01) is not None
    assert moving(0.0, moving_reference=True) is None, "the reference moves along"
    assert moving(0.0, other_reference=True) is None


def test_a_kl_of_exactly_0_is_a_policy_that_stands_or_a_reference_that_goes_with_it() -> None:
    moves = {"train__learning_rate": [1e-6] * 20, "train__grad_norm": [0.3] * 20}
    found = look("detached-reference", history_of(k3=[0.0] * 20, **moves))
    assert found is not None and found.text.startswith("the last 20 values of kl/k3 are exactly 0, train/learning_rate")
    assert found.causes[0].startswith("the reference follows the policy")
    for still in moves:
        history = history_of(k3=[0.0] * 20, **moves | {still: [0.0] * 20})
        assert look("detached-reference", history) is None and look("not-trained", history) is not None
    assert look("detached-reference", history_of(k3=[0.0] * 20, groups__saturated=[1.0] * 20)) is None
    assert look("detached-reference", history_of(k3=[*[0.0] * 19, 1e-12])) is None
    assert look("detached-reference", history_of(k3=[0.0] * 19)) is None
    assert look("detached-reference", history_of(k3=[0.0] * 20, settings=RunSettings(beta=0.0))) is None
    assert look("kl-low", history_of(k3=[-0.3] * 20)) is None


def test_a_kl_that_vanishes_in_one_step_is_a_reference_that_was_replaced() -> None:
    evidence = look("detached-reference", history_of(k3=[0.0, 0.3, 0.47, 0.0]))
    assert evidence is not None and "fell from 0.47 to 0 " in evidence.text
    assert look("detached-reference", history_of(k3=[0.0, 0.3, 0.47, 0.0049])) is None
    assert look("detached-reference", history_of(k3=[0.0, 0.019, 0.019, 0.0])) is None
    assert look("detached-reference", history_of(k3=[0.0, 0.3, 0.0, 0.0])) is None, "that is noise"
    told = RunSettings(moving_reference=True)
    assert look("detached-reference", history_of(k3=[0.3, 0.47, 0.0], settings=told)) is None


@pytest.mark.parametrize(
    ("teeth", "raised"), [((9, 9, 9), 0), ((5, 9, 9), 0), ((9, 20, 6), 3), ((9, 20), 2), ((9,), 1)]
)
def test_a_saw_tooth_is_a_reference_that_is_reset_on_purpose(teeth: tuple[int, ...], raised: int) -> None:
    kl = [0.01 * step for length in teeth for step in range(length)] + [0.0, 0.01]
    found = [each.steps for each in examine(history_of(k3=kl)).findings if each.alarm.name == "detached-reference"]
    assert sum(found) == raised


def test_notes_on_how_far_the_policy_is() -> None:
    assert look("kl-high", history_of(k3=[0.21] * 5)) is not None
    assert look("kl-high", history_of(k3=[0.19] * 5)) is None
    assert look("kl-high", history_of(k3=[0.9] * 4)) is None
    low = look("kl-low", history_of(k3=[0.009] * 20))
    assert low is not None and low.text == "the KL is 0.009 nats per token, mean of the last 5 but the largest"
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
    short, wild = {"k3": [0.7] * 5, "length": [30.0] * 5}, [3.0, 2.6, -0.2, 1.4, 1.0]
    assert look("kl-far", history_of(k1=[1.5] * 5, **short)) is not None, "one word is sampled, and k3 misses the rest"
    assert (
        look("kl-far", history_of(k1=[0.9] * 5, **short)) is None
        and look("kl-far", history_of(k1=wild, **short)) is None
    )
    assert look("kl-far", history_of(k1=[1.5] * 5, exact=[0.8] * 5, **short)) is None, "the exact KL misses nothing"


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


def aimed(level: float, steps: int = 40, *, reached: float = 1.0, beta: float = 0.02, **settings: object) -> History:
    """A run that reaches its target of 0.02 and is then at a level, in targets; beta goes on by such a step."""
    kl = [0.02 * x for x in (0.1, reached, *[level] * steps)]
    curves = {"k3": kl, "kl__target": [0.02] * len(kl), "beta": [0.3 + beta * i for i in range(len(kl))]}
    return history_of(settings=RunSettings(**settings), **curves)


@pytest.mark.parametrize(
    ("history", "causes"),
    [
        (aimed(1.31), []),
        (aimed(0.69), []),
        (aimed(1.29), None),
        (aimed(0.71), None),
        (aimed(1.31, 39), None),
        (aimed(0.69, reached=0.99), None),  # the task does not reach it
        (aimed(4.0, beta=0.0, prompts=4), ["beta stays at 0.3: its upper bound", "4 prompts per step"]),
        (aimed(0.3, beta=0.0), None),  # nor ask for it
        (aimed(4.0, prompts=8), []),
        (history_of(k3=[0.02, *[0.08] * 60]), None),  # a fixed beta
        (history_of(k3=[0.02] * 70, kl__target=[0.02] * 40 + [0.01] * 30), None),  # lowered by a resume, 30 steps ago
    ],
)
def test_a_target_is_missed_by_thirty_per_cent_for_forty_steps(history: History, causes: list[str] | None) -> None:
    evidence = look("target-missed", history)
    assert (evidence is None) == (causes is None)
    for text, start in zip(evidence.causes if evidence else (), causes or (), strict=True):
        assert text.startswith(start)


def test_the_share_in_the_band_is_that_of_the_means_since_the_target_was_reached() -> None:
    assert share_in_band(aimed(1.2)) == 1.0 and share_in_band(aimed(2.0)) == 0.0
    assert share_in_band(aimed(1.2, 19)) is None and share_in_band(history_of(k3=[0.02] * 60)) is None
    later = aimed(1.9, 84)
    later.rows[2:25] = aimed(1.0, 23).rows[2:]
    assert share_in_band(later) == pytest.approx((4 + 6) / 65), "six more means hold up to six of the later steps"


def test_a_sum_over_a_completion_that_is_below_0_is_negative_too() -> None:
    assert look("negative-k1", history_of(kl__k1_sequence=[0.0, -14.1])) is not None
    assert look("negative-k1", history_of(kl__k1_sequence=[0.0, -13.9])) is None
    evidence = look("negative-k1", history_of(kl__k1_sequence=[-0.5 - 0.01 * (i % 3) for i in range(8)]))
    assert evidence is not None and evidence.text.startswith("the last 8 values of kl/k1_sequence are below 0")
    assert look("negative-k1", history_of(kl__k1_sequence=[-0.5] * 7)) is None
    assert look("negative-k1", history_of(k3=[-0.5])) is not None, "as a callback sees it, which cannot read it anew"
    assert look("negative-k1", history_of(k3=[-1e-8] * 30)) is None, "rounding"
    assert look("negative-k1", history_of(kl__k1_sequence=noisy(0.5, 12, scale=1.0))) is None


def test_one_outlier_is_no_distance() -> None:
    curves = {"k3": [0.02] * 4 + [40.0] + [0.02] * 4, "length": [50.0] * 9}
    assert not {f.alarm.name for f in examine(history_of(**curves)).findings} & {"kl-far", "kl-high"}
    curves["k3"] = [0.02] * 4 + [40.0] * 5
    assert {f.alarm.name for f in examine(history_of(**curves)).findings} >= {"kl-far", "kl-high"}


@pytest.mark.parametrize(
    ("name", "kl", "tokens", "alarmed"),
    [("k3", 0.0029, 1e6, False), ("k3", 0.0031, 1e6, True), ("k1", -0.0031, 1e6, False), ("k1", -0.0035, 1e6, True),
     ("k3", 0.0041, None, False), ("k3", 0.0043, None, True), ("k1", 0.024, None, False), ("k1", 0.026, None, True)],
)  # fmt: skip
def test_at_step_zero_other_data_types_may_differ(name: str, kl: float, tokens: float | None, alarmed: bool) -> None:
    """By four standard errors of as many tokens as the record tells, or of 200."""
    others, curves = RunSettings(other_kernels=True), {name: [kl]} | ({"length": [tokens]} if tokens else {})
    assert (look("step-zero-kl", history_of(settings=others, **curves)) is not None) is alarmed
    assert look("step-zero-kl", history_of(**{name: [kl]})) is not None, "klamp's own have one"


def test_kernels_alone_raise_no_alarm_at_step_zero_whatever_the_number_of_tokens() -> None:
    generator, others = torch.Generator().manual_seed(0), RunSettings(other_kernels=True)
    for tokens in (24, 96, 384, 1536):
        for _ in range(100):
            delta = 0.075 * torch.randn(tokens, generator=generator, dtype=torch.float64)  # a k3 of .0028
            drawn = {"k1": float(delta.mean()), "k3": float((torch.expm1(-delta) + delta).mean())}
            for name, value in drawn.items():
                history = history_of(settings=others, length__total=[float(tokens)], **{name: [value]})
                assert look("step-zero-kl", history) is None


@pytest.mark.parametrize("length", [math.nan, 0.0, math.inf])
def test_a_length_that_is_none_hides_no_kl_at_step_zero(length: float) -> None:
    history = history_of(settings=RunSettings(other_kernels=True), k3=[0.4], length=[length])
    assert look("step-zero-kl", history) is not None


def test_a_learning_rate_is_not_blamed_for_the_scatter_of_a_large_kl() -> None:
    curve = noisy(7.0, 30, scale=0.4)
    assert not learning_rate(history_of(k3=curve))
    assert learning_rate(history_of(k3=[x + 4.0 * (i > 15) for i, x in enumerate(curve)]))
    assert learning_rate(history_of(k3=[0.5 * i for i in range(12)])), "a slope is no scatter"


def test_a_kl_that_no_policy_has_is_not_the_learning_rates() -> None:
    """Single log-ratios, or numbers that are wrong: a policy that moved too fast is a few nats away."""
    far, fast = ([0.02] * 5 + [end] for end in (900.0, 0.7))
    causes = [
        f.evidence.causes[0] for c in (far, fast) for f in examine(history_of(k3=c)).findings if "spike" in f.alarm.name
    ]
    assert [cause.split(",")[0] for cause in causes] == ["a few tokens", "the learning rate"]


def test_a_negative_beta_is_an_alarm_unless_a_teacher_takes_it() -> None:
    assert look("negative-beta", history_of(beta=[0.1, -0.0105])) is not None
    assert look("negative-beta", history_of(k3=[0.1], settings=RunSettings(beta=-0.001))) is not None
    for sound in (history_of(beta=[0.0]), history_of(k3=[0.1]), history_of(beta=[-0.5], teacher__kl=[0.1])):
        assert look("negative-beta", sound) is None, "G-OPD has beta 1 - lambda beside a teacher"


def test_a_loss_that_leaves_the_kl_out() -> None:
    policy, kl = [0.1] * 20, [0.3] * 20
    for share, beta, in_loss, alarmed in (
        (0.009, 0.05, True, True),
        (0.011, 0.05, True, False),
        (0.0, 3e-4, True, False),
        (0.0, 0.05, False, False),
    ):
        settings = RunSettings(beta=beta, kl_in_loss=in_loss)
        loss = [x + share * beta * y for x, y in zip(policy, kl, strict=True)]
        history = history_of(train__loss=loss, train__policy_loss=policy, k3=kl, settings=settings)
        assert (look("kl-not-in-loss", history) is not None) is alarmed
