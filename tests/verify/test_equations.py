"""Equations: what is written is what the configuration computes."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.core.gradients import kl_penalty
from klamp.verify.explain import COEFFICIENTS, OWN, equations


def lines(**choices: object) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return equations(KLConfig(**choices), LossConfig())


def evaluate(formula: str, policy: float, ref: float) -> float:
    """A printed coefficient (or value) of one token, as arithmetic."""
    words = {"ref_t/policy_t": str(math.exp(ref - policy)), "delta_t": f"({policy - ref})", "^": "**", "|": ""}
    if formula.startswith("|"):
        return abs(policy - ref)
    for word, number in words.items():
        formula = formula.replace(word, number)
    return eval(formula, {"exp": math.exp, "sign": lambda x: math.copysign(1, x)})


@pytest.mark.parametrize(
    ("value", "gradient"), list(itertools.product(("k1", "k2", "k3", "abs"), ("reverse", "forward", "own")))
)
def test_value_and_coefficient_of_one_token_are_what_kl_penalty_computes(value: str, gradient: str) -> None:
    for policy, ref in ((-0.5, -1.5), (-2.0, -0.25)):
        leaf = torch.tensor([[policy]], dtype=torch.float64, requires_grad=True)
        reference, mask = torch.tensor([[ref]], dtype=torch.float64), torch.tensor([[True]])
        result = kl_penalty(leaf, reference, mask, value=value, gradient=gradient)  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(result.sum(), leaf)
        _, printed, backward = lines(kl_estimator=value, kl_gradient=gradient)
        coefficient = backward.removeprefix("gradient of penalty_t = ").removesuffix(" grad log policy_t")
        assert evaluate(printed.removeprefix("penalty_t = "), policy, ref) == pytest.approx(result.item())
        assert evaluate(coefficient, policy, ref) == pytest.approx(slope.item())


def test_every_choice_has_an_equation() -> None:
    assert set(COEFFICIENTS) == {(h, g) for h in ("token", "sequence") for g in ("reverse", "forward")}
    assert set(OWN) == {"k1", "k2", "k3", "abs"}
    assert lines(kl_gradient="none")[-1] == "gradient of penalty_t = 0"


def test_weights_horizons_and_placements_show() -> None:
    token = lines(kl_off_policy="token")
    assert token[1] == "penalty_t = w_t (exp(-delta_t) - 1 + delta_t), w_t = policy_t/sampler_t"
    assert token[2] == "gradient of penalty_t = (w_t delta_t) grad log policy_t"
    prefix = lines(kl_off_policy="sequence", kl_horizon="sequence")
    assert prefix[2] == "gradient of penalty_t = (rho_t delta_t + sum over later j of rho_j k3_j) grad log policy_t"
    assert "sum over later j of exact_j" in lines(kl_estimator="exact", kl_horizon="sequence")[2]
    assert lines(kl_estimator="exact", kl_gradient="forward")[2].endswith("sum_v ref_v (log ref_v - log policy_v)")
    assert lines(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence") == [
        "reward = reward - beta * sum_t delta_t, before the advantages are formed"
    ]
    assert "sum over j >= t of delta_j" in lines(kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")[0]
    assert "beta * delta_t," in lines(kl_estimator="k1", kl_placement="advantage")[0]


def test_reductions_and_clips_show() -> None:
    assert "mean over completions of the sum over tokens" in lines(kl_normalizer="sequence_sum")[0]
    assert lines(kl_clip_method="hard")[-1].endswith("1 where the completion's KL is above the budget, 0 below")
    clipped = {"kl_estimator": "k1", "kl_clip_method": "hard", "kl_horizon": "sequence"}
    assert lines(**clipped, kl_placement="reward") == [
        "advantage = A[reward] - beta * A[sum_t delta_t], A: how advantages are formed of rewards",
        "beta multiplied by 1 where the completion's KL is above the budget, 0 below",
    ]
    assert lines(**clipped, kl_placement="advantage")[1].startswith("beta multiplied by 1 where")
    assert lines(kl_clip_method="soft", kl_clip_temperature=0.5)[-1].endswith("- budget) / 0.5)")
