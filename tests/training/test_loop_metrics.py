"""What the loop of the guide records: parts put together, the entropy, beta's price."""

from __future__ import annotations

import pytest
import torch
from tests.training.conftest import disturb, tiny_llama
from tests.training.test_sampling import sample

from klamp.config import KLConfig, LossConfig
from klamp.scoring.completions import select
from klamp.scoring.scores import Scores, score
from klamp.training.config import RolloutConfig
from klamp.training.loop import measure_tokens, part_scores

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
