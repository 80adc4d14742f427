"""Rules over the KL: its estimates, its jumps, the distance to the reference, and its strength against the reward."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diagnostics.histories import history_of, look, noisy, rises, steps_of

from klamp.doctor.alarms_kl import share_in_band
from klamp.doctor.causes import learning_rate
from klamp.doctor.examine import examine
from klamp.doctor.history import History, RunSettings

CALM, WILD = [0.05, 0.07, 0.06, 0.08, 0.07], [0.01, 0.09, 0.02, 0.08, 0.01, 0.06]
APART = [-0.01 - 0.009 * (-1) ** i for i in range(20)]
CHOSEN = RunSettings(other_reference=True)
POOLED = RunSettings(k3_over_updates=True)
MOVING = RunSettings(moving_reference=True)
STANDS, MOVES = {"k3": [0.0] * 20}, {"train__learning_rate": [1e-6] * 20, "train__grad_norm": [0.3] * 20}
LEAST = 2 * (0.6 / 1.6) ** 2
"""The KL of a completion whose reward moves as in `moving`, of a range of twice the largest mean reward."""
SHORT = {"k3": [0.7] * 5, "length": [30.0] * 5}
TEACHERS = {"teacher__kl": [0.3] * 20, "teacher__kl.math": [-0.02] * 20}
WIGGLE = [0.001 * (-1) ** i for i in range(30)]


def moving(kl: float, *, reward: float = 0.8, steps: int = 20, **settings: Any) -> dict[str, Any]:
    """A run whose reward moves at the end from 0.2."""
    rewards = noisy(0.2, steps - 10, scale=0.01) + noisy(reward, 10, scale=0.01, seed=1)
    curves = {"k3": [kl] * steps, "length": [10.0] * steps, "reward": rewards}
    return {"settings": RunSettings(**settings), **curves}


def growing(reward: float, *, by: float = 1.5) -> dict[str, Any]:
    """A KL that grows by this factor every 10 steps, while the reward rises by so much in all."""
    kl = [0.1 * by ** (i // 10) + WIGGLE[i] for i in range(30)]
    return {"k3": kl, "reward": [0.5 + reward * i / 29 + 10 * WIGGLE[i] for i in range(30)]}


def priced(price: float, **changes: list[float]) -> dict[str, Any]:
    """A run whose beta grows thirtyfold, to this price of a nat."""
    curves = {"beta": [0.0, *[0.1] * 10, *[3.0] * 10], "kl__k3_sequence": [2.0] * 21, "reward": [0.9] * 21}
    return curves | {"beta__price": [price] * 21} | changes


def in_loss(share: float, *, beta: float = 0.05, told: bool = True) -> dict[str, Any]:
    """A run whose loss has so much of beta times its KL."""
    loss = [0.1 + share * beta * 0.3] * 20
    curves = {"train__loss": loss, "train__policy_loss": [0.1] * 20, "k3": [0.3] * 20}
    return {"settings": RunSettings(beta=beta, kl_in_loss=told), **curves}


ROWS: list[tuple[str, bool, dict[str, Any]]] = [
    ("negative-k1", True, {"k1": [-0.01] * 20}),
    ("negative-k1", True, {"k1": APART}),
    ("negative-k1", False, {"k1": APART[1:]}),  # by their own scatter they may be
    ("negative-k1", False, {"k1": [*APART[:10], 0.001, *APART[10:]]}),
    ("negative-k1", False, {"k1": [-0.9e-4] * 20}),
    ("negative-k1", True, {"k1": [0.0, -0.11]}),  # at once: 140 tokens, one in a million
    ("negative-k1", False, {"k1": [0.0, -0.09]}),
    ("negative-k1", True, {"kl__k1_sequence": [0.0, -14.1]}),
    ("negative-k1", False, {"kl__k1_sequence": [0.0, -13.9]}),
    ("negative-k1", False, {"kl__k1_sequence": [-0.5] * 7}),
    ("negative-k1", False, {"kl__k1_sequence": noisy(0.5, 12, scale=1.0)}),
    ("negative-k1", True, {"k3": [-0.5]}),  # as a callback sees it, which cannot read it anew
    ("negative-k1", False, {"k3": [-1e-8] * 30}),  # rounding
    ("negative-k1", False, {**TEACHERS, "teacher__teacher_mass": [0.9] * 20}),  # a teacher that is cut
    ("negative-k1", False, {**TEACHERS, "teacher__log_ratio_clamped": [0.9] * 20}),
    ("k3-far-above-k1", True, {"k1": [0.01] * 5, "k3": [0.11] * 5}),
    ("k3-far-above-k1", False, {"k1": [0.01] * 5, "k3": [0.09] * 5}),
    ("k3-far-above-k1", True, {"k1": [-0.01] * 5, "k3": [0.11] * 5}),  # k1 in size
    ("k3-far-above-k1", False, {"k1": [0.01] * 4, "k3": [0.11] * 4}),  # fewer than five steps
    ("k3-far-above-k1", False, {"k1": [0.0] * 5, "k3": [0.049] * 5}),  # k1 may be 0 by noise
    ("k3-far-above-k1", False, {"k1": [0.01] * 5, "k3": [0.11] * 5, "exact": [0.1] * 5}),
    ("k3-far-above-k1", True, {"k1": [0.003], "k3": [1635.0]}),  # at once where it is extreme
    ("k3-far-above-k1", False, {"k1": [0.003], "k3": [0.9]}),
    ("kl-spike", True, {"k3": [*CALM, 0.241]}),
    ("kl-spike", False, {"k3": [*CALM, 0.239]}),
    ("kl-spike", True, {"k3": [*CALM, 0.9, 1.0]}),  # it stays
    ("kl-spike", False, {"k3": [*CALM, 0.9, 1.0, 1.1]}),  # the steps after it are no spike
    ("kl-spike", False, {"k3": [*WILD, 0.9]}),  # of few samples one token does that
    ("kl-spike", True, {"k3": [*WILD, 0.9, 0.7]}),
    ("kl-spike", True, {"exact": [*WILD, 0.9]}),  # nothing is sampled of it but the prompts
    ("kl-spike", False, {"k3": [0.002] * 5 + [0.19]}),  # a KL that is no warning sign
    ("kl-spike", False, {"k3": [0.0, 0.5]}),  # the first steps rise from nothing
    ("kl-spike", True, {"k3": [0.0, 1.5]}),
    ("kl-spike", False, {"k1": [0.05, -0.3, 0.06, 0.07, 0.05, 0.6, 0.7]}),  # k1 jumps both ways
    ("kl-spike", False, {"k1": [-0.01, -0.05, -0.01, -0.06, -0.01, 0.05, 0.25]}),
    ("kl-spike", False, {"k3": [*CALM, 0.5], "exact": [*CALM, 0.06]}),  # exact says it was noise
    ("step-zero-kl", False, {"settings": POOLED, "k3": [0.5]}),  # a mean over updates
    ("step-zero-kl", False, {"settings": POOLED, "k3": [0.5], "k1": [0.9e-4]}),
    ("detached-reference", True, moving(0.0)),
    ("detached-reference", True, moving(0.9 * 0.01 * LEAST / 10)),
    ("detached-reference", False, moving(1.3 * 0.01 * LEAST / 10)),
    ("detached-reference", False, moving(1e-9, reward=0.2)),  # nothing moved
    ("detached-reference", False, moving(-0.1)),  # a mean of k1 that far below 0 is not near to 0
    ("detached-reference", False, moving(0.0, steps=19)),
    ("detached-reference", False, moving(0.0, beta=0.0)),  # no KL holds it, and perhaps none was measured
    ("detached-reference", True, moving(0.0, beta=0.01)),
    ("detached-reference", False, moving(0.0, moving_reference=True)),
    ("detached-reference", False, moving(0.0, other_reference=True)),
    ("detached-reference", False, {**STANDS, "groups__saturated": [1.0] * 20}),
    ("detached-reference", False, {"k3": [*[0.0] * 19, 1e-12]}),
    ("detached-reference", False, {"k3": [0.0] * 19}),
    ("detached-reference", False, {**STANDS, "settings": RunSettings(beta=0.0)}),
    ("detached-reference", False, {"k3": [0.0, 0.3, 0.47, 0.0049]}),
    ("detached-reference", False, {"k3": [0.0, 0.019, 0.019, 0.0]}),
    ("detached-reference", False, {"k3": [0.0, 0.3, 0.0, 0.0]}),  # noise
    ("detached-reference", False, {"k3": [0.3, 0.47, 0.0], "settings": MOVING}),
    ("kl-low", False, {"k3": [-0.3] * 20}),
    ("kl-low", False, {"k3": [0.009] * 19}),  # a run begins there
    ("kl-low", False, {"k3": [0.011] * 20}),
    ("kl-low", False, {"k3": [math.nan] * 20}),
    ("kl-high", True, {"k3": [0.21] * 5}),
    ("kl-high", False, {"k3": [0.19] * 5}),
    ("kl-high", False, {"k3": [0.9] * 4}),
    ("reference-differs", True, {"k3": [0.155], "settings": CHOSEN}),
    ("reference-differs", False, {"k3": [0.019], "settings": CHOSEN}),
    ("reference-differs", False, {"k3": [0.155]}),  # step-zero-kl is about that one
    ("reference-differs", False, {"k3": [0.155] * 2, "settings": CHOSEN}),  # before the first update
    ("reference-differs", False, {"k3": [0.155], "first": 7, "settings": CHOSEN}),  # the record begins late
    ("kl-far", True, {"k3": [1.1] * 5, "length": [8.0] * 5}),
    ("kl-far", False, {"k3": [0.9] * 5, "length": [80.0] * 5}),
    ("kl-far", False, {"k3": [3.0] * 5, "length": [2.0] * 5}),  # one right token may need that
    ("kl-far", False, {"k3": [1.1] * 4, "length": [8.0] * 4}),
    ("kl-far", True, {"k1": [1.5] * 5, **SHORT}),  # one word is sampled, and k3 misses the rest
    ("kl-far", False, {"k1": [0.9] * 5, **SHORT}),
    ("kl-far", False, {"k1": [3.0, 2.6, -0.2, 1.4, 1.0], **SHORT}),
    ("kl-far", False, {"k1": [1.5] * 5, "exact": [0.8] * 5, **SHORT}),  # the exact KL misses nothing
    ("kl-growing", True, growing(0.0)),
    ("kl-growing", True, growing(-0.2)),
    ("kl-growing", False, growing(0.3)),  # it is paid for
    ("kl-growing", False, growing(0.0, by=1.2)),
    ("kl-growing", False, {"k3": [0.01 * i for i in range(29)], "reward": [0.5] * 29}),
    ("beta-runaway", True, priced(0.46)),  # 0.92 against a reward of 0.9
    ("beta-runaway", False, priced(0.44)),
    ("beta-runaway", False, priced(0.46, beta=[0.0, *[0.1] * 10, *[2.9] * 10])),  # 29 times
    ("beta-runaway", False, priced(0.46, reward=[-0.95] * 21)),  # the size of the reward counts
    ("beta-runaway", False, priced(0.46, beta=[0.0] * 21)),
    ("beta-runaway", False, priced(0.46, beta=[0.1, *[3.0] * 8])),
    ("negative-beta", True, {"beta": [0.1, -0.0105]}),
    ("negative-beta", True, {"k3": [0.1], "settings": RunSettings(beta=-0.001)}),
    ("negative-beta", False, {"beta": [0.0]}),
    ("negative-beta", False, {"k3": [0.1]}),
    ("negative-beta", False, {"beta": [-0.5], "teacher__kl": [0.1]}),  # G-OPD has beta 1 - lambda beside a teacher
    ("kl-not-in-loss", True, in_loss(0.009)),
    ("kl-not-in-loss", False, in_loss(0.011)),
    ("kl-not-in-loss", False, in_loss(0.0, beta=3e-4)),
    ("kl-not-in-loss", False, in_loss(0.0, told=False)),
]


@pytest.mark.parametrize(("alarm", "raised", "run"), ROWS)
def test_both_sides_of_each_threshold(alarm: str, raised: bool, run: dict[str, Any]) -> None:
    assert rises(alarm, **run) is raised


@pytest.mark.parametrize("seed", range(3))
def test_noise_around_a_small_kl_is_not_negative_for_long(seed: int) -> None:
    assert not steps_of("negative-k1", history_of(k1=noisy(1e-4, 400, scale=0.005, seed=seed)))


@pytest.mark.parametrize(("last", "prompts", "raised"), [(0.5, 15, False), (0.5, 16, True), (1.5, 1, True)])
def test_completions_of_a_few_prompts_make_no_spike_below_a_nat(last: float, prompts: int, raised: bool) -> None:
    curves = {"k3": [*[0.08] * 5, last]}
    assert rises("kl-spike", settings=RunSettings(prompts=prompts), **curves) is raised
    history = history_of(**curves)
    history.rows[-1] = replace(history.rows[-1], prompts=prompts)
    assert (look("kl-spike", history) is not None) is raised


@pytest.mark.parametrize("name", ["k1", "k3", "exact"])
def test_step_zero(name: str) -> None:
    assert rises("step-zero-kl", **{name: [1.1e-4]})
    assert not rises("step-zero-kl", **{name: [0.9e-4]})
    assert not rises("step-zero-kl", **{name: [0.0, 0.5]}), "the second step may have one"
    assert not rises("step-zero-kl", first=10, **{name: [0.5]}), "ten steps averaged are not the first"
    assert not rises("step-zero-kl", settings=CHOSEN, **{name: [0.5]})


TEXTS = [
    ("step-zero-kl", {"settings": POOLED, "k3": [0.0], "k1": [1.1e-4]}, "kl/k1 is 1.10e-04"),
    ("detached-reference", {**STANDS, **MOVES}, "the last 20 values of kl/k3 are exactly 0, train/learning_rate"),
    ("detached-reference", {"k3": [0.0, 0.3, 0.47, 0.0]}, "fell from 0.47 to 0 "),  # it was replaced
    ("kl-low", {"k3": [0.009] * 20}, "the KL is 0.009 nats per token, mean of the last 5 but the largest"),
    ("negative-k1", {"kl__k1_sequence": [-0.5, -0.51] * 4}, "the last 8 values of kl/k1_sequence are below 0"),
    ("negative-k1", TEACHERS, "teacher/kl.math"),
]


@pytest.mark.parametrize(("alarm", "run", "text"), TEXTS)
def test_an_alarm_says_what_was_seen(alarm: str, run: dict[str, Any], text: str) -> None:
    evidence = look(alarm, history_of(**run))
    assert evidence is not None and text in evidence.text


def test_a_kl_of_exactly_0_is_a_policy_that_stands_or_a_reference_that_goes_with_it() -> None:
    found = look("detached-reference", history_of(**STANDS, **MOVES))
    assert found is not None and found.causes[0].startswith("the reference follows the policy")
    for still in MOVES:
        run = {**STANDS, **MOVES, still: [0.0] * 20}
        assert not rises("detached-reference", **run) and rises("not-trained", **run)


@pytest.mark.parametrize(
    ("teeth", "raised"), [((9, 9, 9), 0), ((5, 9, 9), 0), ((9, 20, 6), 3), ((9, 20), 2), ((9,), 1)]
)
def test_a_saw_tooth_is_a_reference_that_is_reset_on_purpose(teeth: tuple[int, ...], raised: int) -> None:
    kl = [0.01 * step for length in teeth for step in range(length)] + [0.0, 0.01]
    found = [each.steps for each in examine(history_of(k3=kl)).findings if each.alarm.name == "detached-reference"]
    assert sum(found) == raised


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
