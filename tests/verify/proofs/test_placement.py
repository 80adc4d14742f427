"""The checks of the placement fail when a shift has the wrong sign, or when noise is divided by a small number."""

from __future__ import annotations

import pytest
import torch
from tests.verify.proofs.broken import failures

from klamp.core.advantages import group_advantages
from klamp.core.penalty import kl_in_advantage, kl_in_reward
from klamp.verify.proofs import steps
from klamp.verify.proofs.steps import prove_placement

# Shapes are checked in tests/core; here they would cost minutes.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shapes_unchecked")]


def test_a_shift_of_the_advantage_with_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(*args: object, beta: float, **kwargs: object) -> object:
        return kl_in_advantage(*args, beta=-beta, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("klamp.core.penalty.kl_in_advantage", flipped)
    assert "in the advantage, reward-to-go; mixed groups" in failures(prove_placement)


def test_a_kl_that_is_added_to_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.core.penalty.kl_in_reward", lambda r, k, *, beta: kl_in_reward(r, k, beta=-beta))
    found = failures(prove_placement)
    assert "in the reward, against the mean of the others; saturated groups" in found
    assert not [claim for claim in found if claim.startswith("in the advantage")]


def test_a_saturated_group_that_divides_noise_by_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(rewards: torch.Tensor, group_size: int, **choices: object) -> torch.Tensor:
        return group_advantages(rewards, group_size, **choices) + 1e-6  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "group_advantages", noisy)
    assert "a group whose rewards are all equal" in failures(prove_placement)


def test_a_reward_that_is_divided_by_the_std_and_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "build_objective", lambda *args, **kwargs: None)
    assert failures(prove_placement) == ["so klamp refuses it"]
