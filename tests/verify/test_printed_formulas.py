"""Printed formulas, functions with known faults, configurations: what is measured, and the sentences that follow."""

import functools
import math

import pytest
import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.core.gradients import kl_penalty
from klamp.errors import ShapeError, UnknownNameError
from klamp.verify.explain import measure_config
from klamp.verify.judge import FORMS, Explanation, explain_form, judge


@pytest.mark.parametrize("name", [name for name in FORMS if name != "exact-kl"])
def test_the_formula_is_the_printed_one(name: str) -> None:
    """Written a second time, from where it is printed, on plain numbers."""
    policy, ref = torch.tensor([[-0.5, -2.0]], dtype=torch.float64), torch.tensor([[-1.5, -0.25]], dtype=torch.float64)
    printed = {
        "k1-as-loss": lambda p, r: p - r,
        "minus-k1": lambda p, r: r - p,
        "ratio-weighted": lambda p, r: math.exp(p - r) * (p - r),
        "k3-as-loss": lambda p, r: math.exp(r - p) - (r - p) - 1,
    }[name]
    by_hand = [printed(p, r) for p, r in zip(policy[0].tolist(), ref[0].tolist(), strict=True)]
    assert FORMS[name].function(policy, ref)[0].tolist() == pytest.approx(by_hand, abs=1e-14)


@functools.cache
def explained(name: str) -> Explanation:
    return explain_form(name)


VERDICTS = [
    ("k1-as-loss", "the expected gradient is zero, so it regularises nothing"),
    ("minus-k1", "the sign is wrong, a reward for leaving the reference"),
    ("ratio-weighted", "for tokens of the policy it is not KL(policy||ref)"),
    ("exact-kl", "the value is right; it follows the gradient of KL(policy||ref)"),
    ("k3-as-loss", "it follows the gradient of KL(ref||policy)"),
]


@pytest.mark.parametrize(("name", "words"), VERDICTS)
def test_the_verdict_follows_from_the_numbers(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in explained(name).verdict
    other = "k3-as-loss" if name != "k3-as-loss" else "k1-as-loss"
    swapped = FORMS[name]._replace(function=FORMS[other].function, use=FORMS[other].use)
    monkeypatch.setattr("klamp.verify.judge.FORMS", {name: swapped})
    assert words not in explain_form(name).verdict


def test_the_numbers_of_the_lines() -> None:
    value = dict(explained("ratio-weighted").lines)["value"]
    assert value == "+9.3731 nats per token where KL(policy||ref) is +0.8851"
    assert ("", "with tokens of the reference +0.8851") in explained("ratio-weighted").lines
    assert "cosine 0.510 to 0.996 with KL(policy||ref)" in dict(explained("exact-kl").lines)["sequence"]
    assert "float16" in dict(explained("k3-as-loss").lines)["at 30 nats"]
    assert [name for name in FORMS if "at 30 nats" in dict(explained(name).lines)] == ["ratio-weighted", "k3-as-loss"]


def test_another_name_and_another_use_are_refused() -> None:
    assert set(FORMS) == {name for name, _ in VERDICTS}
    with pytest.raises(UnknownNameError, match="did you mean 'minus-k1"):
        explain_form("minus-k2")
    with pytest.raises(UnknownNameError, match="use"):
        judge(k1, use="advantage")  # type: ignore[arg-type]


def k1(policy: Tensor, ref: Tensor) -> Tensor:
    return policy - ref


def k2(policy: Tensor, ref: Tensor) -> Tensor:
    return (policy - ref) ** 2 / 2


def k3(policy: Tensor, ref: Tensor) -> Tensor:
    return torch.exp(ref - policy) - (ref - policy) - 1


def klamps(policy: Tensor, ref: Tensor) -> Tensor:
    return kl_penalty(policy, ref, torch.ones_like(policy, dtype=torch.bool))


@pytest.mark.parametrize(
    ("function", "estimates", "as_loss", "in_reward"),
    [
        (k1, "KL(policy||ref)", "zero", "KL(policy||ref)"),
        (lambda p, r: r - p, "minus KL(policy||ref)", "zero", "minus KL(policy||ref)"),
        (k2, "neither KL", "KL(policy||ref)", "neither KL"),
        (k3, "KL(policy||ref)", "KL(ref||policy)", "KL(policy||ref) minus KL(ref||policy)"),
        (lambda p, r: 0.5 * k2(p, r), "neither KL", "0.5 x KL(policy||ref)", "neither KL"),
        (lambda p, r: (p - r).exp() * (p - r), "neither KL", "neither KL", "neither KL"),
        (lambda p, r: (p - p.detach()).exp() * k3(p, r), "KL(policy||ref)", "KL(policy||ref)", None),
        (klamps, "KL(policy||ref)", "KL(policy||ref)", None),
    ],
)
def test_value_and_gradient_are_named(function, estimates: str, as_loss: str, in_reward: str | None) -> None:
    judgement = judge(function)
    assert judgement.value.estimates == estimates
    assert judgement.gradient.follows.in_words == as_loss
    if in_reward is not None:
        assert judge(function, use="reward").gradient.follows.in_words == in_reward


def test_numbers_of_value_and_gradient() -> None:
    biased = judge(lambda p, r: 1.1 * (p - r))
    assert biased.value.relative_bias == pytest.approx(0.1, abs=1e-12)
    assert biased.value.expected == pytest.approx(1.1 * biased.value.reverse_kl)
    assert biased.value.lowest < 0 < biased.value.standard_deviation
    judgement = judge(k3)
    assert judgement.value.lowest >= 0
    assert 0 < judgement.gradient.cosine_reverse < 0.99
    assert judge(k1).gradient.cosine_reverse == 0.0
    assert judge(k2).gradient.share == pytest.approx(1.0)


def test_a_function_that_computes_in_float32_is_still_recognised() -> None:
    judgement = judge(lambda p, r: k3(p.float(), r.float()))
    assert (judgement.value.estimates, judgement.gradient.follows.name) == ("KL(policy||ref)", "forward")


def test_a_detached_value_has_no_gradient_and_an_exception_is_the_callers() -> None:
    assert judge(lambda p, r: (p - r).detach()).gradient.follows.name == "zero"
    with pytest.raises(ZeroDivisionError):
        judge(lambda p, r: p / (1 // 0))


@pytest.mark.parametrize("function", [lambda p, r: (p - r).mean(), lambda p, r: 1.0, lambda p, r: (p - r).flatten()])
def test_what_returns_no_number_per_token_is_refused(function) -> None:
    with pytest.raises(ShapeError, match="one number per token"):
        judge(function)


@functools.cache
def measure(loss: LossConfig | None = None, **choices: object):
    return measure_config(KLConfig(**choices), loss or LossConfig())


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_k1s_own_gradient_is_nothing_but_noise() -> None:
    facts = measure(LossConfig(loss_type="dapo"), kl_estimator="k1", kl_gradient="own")
    assert facts.position.follows.name == facts.sequence.follows.name == "zero" and facts.reduced == (1, 1)
    assert (facts.sequence.share, facts.noise) == (0.0, math.inf)
    assert measure(kl_gradient="none").noise == 0, "no completion has a gradient"
    assert facts.off_policy.follows.name == "none of these"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_divided_by_the_own_length_k1_is_not_null() -> None:
    facts = measure(LossConfig(loss_type="grpo"), kl_estimator="k1", kl_gradient="own")
    assert facts.reduced == (0, 0) and measure(kl_estimator="k1", kl_gradient="own").reduced == (1, 1)


def test_beta_clip_and_controller_keep_the_direction() -> None:
    """What a gradient follows off-policy and in the reward: tests/verify/test_sentences.py."""
    other = measure(beta=0.5, kl_clip_method="hard", target_kl=0.05, beta_max=0.9, kl_clip_threshold=0.01)
    assert other.sequence == measure().sequence
    in_reward = measure(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    assert math.isnan(in_reward.value_bias)
