"""What is recorded of a step: parts put together, the entropy, beta's price."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.conftest import disturb, tiny_llama
from tests.training.test_sampling import sample

from klamp.config import KLConfig, LossConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError
from klamp.scoring.completions import select
from klamp.scoring.scores import Scores, score
from klamp.training.config import RolloutConfig
from klamp.training.loop import measure_tokens, part_scores
from klamp.training.updates import added_parts

ROLLOUT = RolloutConfig(num_generations=3, max_completion_length=8)
KL, LOSS = KLConfig(beta=0.5, kl_estimator="k1"), LossConfig(loss_type="dapo", advantage_baseline="mean")


def measured(parts: list[list[int]], *, loss: LossConfig = LOSS, equal: bool = False) -> dict[str, float]:
    """The metrics of six completions that were scored in these parts."""
    model, ref = tiny_llama(), tiny_llama()
    disturb(model, size=0.03)
    completions = sample(tiny_llama(), prompts=["1+1="] * 3 + ["rev ab="] * 3)
    scores = []
    for rows in parts:
        part = select(completions, torch.tensor(rows))
        theirs = score(ref, part, temperature=1.0).logprobs
        scores.append(part_scores(score(model, part, temperature=1.0), theirs))
    rewards = torch.ones(6) if equal else torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    return measure_tokens(completions, rewards, scores, rollout=ROLLOUT, kl=KL, loss=loss)


def test_parts_give_what_the_whole_gives() -> None:
    whole = measured([[0, 1, 2, 3, 4, 5]])
    assert measured([[0], [1, 2, 3], [4, 5]]) == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert whole["kl/k3"] > 1e-3


def test_what_is_kept_of_a_part_has_no_gradient_and_no_logits() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [5.0, -torch.inf, -torch.inf]]], requires_grad=True)
    ours, theirs = part_scores(Scores(logprobs=logits.sum(-1), logits=logits), logits.sum(-1))
    assert ours.entropy is not None and theirs is not None
    torch.testing.assert_close(ours.entropy, torch.tensor([[2.0, 1.0]]).log())
    assert ours.logits is None
    assert not any(x.requires_grad for x in (ours.logprobs, ours.entropy, theirs.logprobs))
    bare, nobody = part_scores(Scores(logprobs=torch.zeros(1, 2)), None)
    assert bare.entropy is None and nobody is None


def test_the_price_is_that_of_the_loss_and_the_advantages() -> None:
    found, spread = measured([[0, 1, 2, 3, 4, 5]]), (1 / 3) ** 0.5
    assert (found["beta"], found["groups/saturated"]) == (0.5, 0.5)
    assert found["beta/price"] == pytest.approx(0.5 * 3 / 2 * spread), "a token mean on both sides, a group of three"
    assert measured([[0, 1, 2, 3, 4, 5]], loss=LossConfig())["beta/price"] == 0.5
    assert "beta/price" not in measured([[0, 1, 2, 3, 4, 5]], equal=True), "no group says what a nat costs"


def test_a_part_adds_by_each_metrics_reduction_and_one_without_a_row_is_refused() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    carried = torch.tensor([[True, False, True], [False, False, False]])
    totals = Totals(sequences=8, tokens=16, kl_tokens=10)
    rollout: Any = SimpleNamespace(mask=mask, kl_mask=carried, kl_weight=None, totals=totals)
    names = ("kl/budget", "policy/logp_mean", "kl/k3", "train/loss", "kl/log_ratio_max")
    found = added_parts(dict.fromkeys(names, 1.0), rollout, slice(0, 2))
    assert found == {"kl/budget": 2 / 8, "policy/logp_mean": 4 / 16, "kl/k3": 2 / 10, "train/loss": 1.0}
    with pytest.raises(ConfigError, match="no row in METRICS"):
        added_parts({"kl/k3": 1.0, "kl/new": 1.0}, rollout, slice(0, 2))
