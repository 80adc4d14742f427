"""The proofs pass on klamp as it is, and each one fails when what it proves is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import klamp.core.gradients as gradients
from klamp.core.advantages import group_advantages
from klamp.core.beta_rules import BetaState, ProportionalRule, StepRule
from klamp.core.clipping import clip_gate, clip_kl
from klamp.core.estimators import ESTIMATORS
from klamp.verify.proofs import ESTIMATOR_PROOFS, PROOFS, verify_all, verify_estimators
from klamp.verify.proofs.check import run_section

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes

VALUES, GAUSSIANS = "values: tokens of the policy", "values: Gaussians (Schulman)"
ONE, SEQUENCES = "gradients, one position: klamp", "gradients over sequences: klamp"
PLACEMENT, CLIPS = "placement: reward and advantage", "clips and budgets"
CONTROLLERS, FAR = "controllers", "thirty nats"


def failures(section: str) -> list[str]:
    return [check.claim for check in run_section(section, PROOFS[section]) if not check.passed]


def break_estimator(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(ESTIMATORS, name, dataclasses.replace(ESTIMATORS[name], **changes))  # type: ignore[arg-type]


def break_coefficient(monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], broken: Callable[..., object]) -> None:
    monkeypatch.setitem(gradients.COEFFICIENTS, key, broken)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", PROOFS)
def test_a_section_passes_and_says_something(section: str) -> None:
    checks = run_section(section, PROOFS[section])
    assert [check.claim for check in checks if not check.passed] == []
    assert len(checks) >= 6
    assert all(check.section == section and check.claim and check.measured and check.expected for check in checks)
    assert len({check.claim for check in checks}) == len(checks)


def test_the_estimators_are_a_part_of_everything() -> None:
    few, many = verify_estimators(), verify_all()
    assert {check.section for check in few} == set(ESTIMATOR_PROOFS)
    assert {check.section for check in many} == set(PROOFS)
    assert len(few) < len(many)


def test_k3_with_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k3", value=lambda delta: -(torch.expm1(-delta) + delta))
    assert "E[k3] - KL(policy||ref)" in failures(VALUES)
    assert "k3 is never negative" in failures(VALUES)
    assert failures(GAUSSIANS)


def test_k3_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(policy - ref) instead of exp(ref - policy): the k3 bug report's first thought."""
    break_estimator(monkeypatch, "k3", value=lambda delta: torch.expm1(delta) - delta)
    assert "E[k3] - KL(policy||ref)" in failures(VALUES)
    assert "top-p sampling: k3 is low by the reference's lost mass" in failures(VALUES)


@pytest.mark.parametrize(
    ("name", "value"), [("k1", lambda d: -d), ("k2", lambda d: d**2), ("abs", lambda d: d.abs() / 2)]
)
def test_other_values_broken(name: str, value: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, name, value=value)
    assert failures(VALUES)


def test_an_own_gradient_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k2", derivative=lambda delta: -delta)
    assert failures(ONE) == ["k2 as a loss (its own gradient)"]


@pytest.mark.parametrize(
    ("key", "broken", "section"),
    [
        (("token", "reverse"), lambda value, log_w, delta: -log_w.exp() * delta, ONE),
        (("token", "reverse"), lambda value, log_w, delta: delta, ONE),  # the weight is forgotten
        (("token", "forward"), lambda value, log_w, delta: log_w.exp() * torch.expm1(-delta), ONE),
        (("token", "reverse"), lambda value, log_w, delta: log_w.exp() * delta.clamp(-20, 20), FAR),
        (("sequence", "reverse"), lambda value, log_w, delta: log_w.exp() * delta, SEQUENCES),
        (("sequence", "forward"), lambda value, log_w, delta: -torch.expm1(-delta), SEQUENCES),
    ],
)
def test_a_coefficient_broken(
    key: tuple[str, str], broken: Callable[..., object], section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_coefficient(monkeypatch, key, broken)
    assert failures(section)


def test_the_exact_kl_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.core.estimators import DIRECTIONS

    monkeypatch.setitem(DIRECTIONS, "reverse", DIRECTIONS["forward"])
    assert "exact at one position - KL(policy||ref)" in failures(VALUES)
    assert {"horizon token, exact", "horizon sequence, exact"} <= set(failures(SEQUENCES))


def test_a_shift_of_the_advantage_with_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.core.placement import kl_in_advantage

    def flipped(*args: object, beta: float, **kwargs: object) -> object:
        return kl_in_advantage(*args, beta=-beta, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("klamp.core.term.kl_in_advantage", flipped)
    assert "in the advantage, reward-to-go; mixed groups" in failures(PLACEMENT)


def test_a_saturated_group_that_divides_noise_by_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(rewards: torch.Tensor, group_size: int, **choices: object) -> torch.Tensor:
        return group_advantages(rewards, group_size, **choices) + 1e-6  # type: ignore[arg-type]

    monkeypatch.setattr("klamp.verify.proofs.placement.group_advantages", noisy)
    assert "a group whose rewards are all equal" in failures(PLACEMENT)


def test_a_clip_and_a_gate_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_half(kl: torch.Tensor, threshold: float, **choices: object) -> torch.Tensor:
        return clip_kl(kl, threshold / 2, **choices)  # type: ignore[arg-type]

    monkeypatch.setattr("klamp.verify.proofs.clipping.clip_kl", at_half)
    assert {"hard: max(0, 2 - 5) + max(0, 8 - 5)", "soft: slope sigmoid(8 - 5), by autograd"} <= set(failures(CLIPS))
    monkeypatch.undo()
    monkeypatch.setattr("klamp.core.term.clip_gate", lambda *args, **kwargs: 0.5 * clip_gate(*args, **kwargs))
    assert "hard clip at 0: no clip" in failures(CLIPS)


def test_controllers_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepRule, "_next", lambda self, state, kl, n_steps: BetaState(state.value * 2))
    assert {"step: KL above 1.5 targets", "step: KL on target"} <= set(failures(CONTROLLERS))
    monkeypatch.setattr(ProportionalRule, "_next", lambda self, state, kl, n_steps: state)
    assert "proportional: more steps than the horizon is refused" in failures(CONTROLLERS)


def test_a_proof_that_stops_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ESTIMATORS, "abs")
    checks = run_section(VALUES, PROOFS[VALUES])
    assert [(check.claim, check.passed) for check in checks] == [("the proof runs to its end", False)]
    assert "KL estimator" in checks[0].measured or "KeyError" in checks[0].measured
