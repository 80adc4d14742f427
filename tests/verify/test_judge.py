"""Judging functions whose faults are known: each fault is found."""

import pytest
import torch
from torch import Tensor

from klamp.core.gradients import kl_penalty
from klamp.errors import ShapeError, UnknownNameError
from klamp.verify.judge import judge


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


def test_an_unknown_use_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="use"):
        judge(k1, use="advantage")  # type: ignore[arg-type]
