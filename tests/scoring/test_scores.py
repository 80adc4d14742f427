"""Scoring: what a plain forward of each sequence by itself says, gradient included."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.training.conftest import disturb, tiny_llama
from tests.training.test_sampling import sample

from klamp.scoring.completions import Completions, select
from klamp.scoring.scorer import score
from klamp.tasks.arithmetic import arithmetic_tokenizer
from klamp.training.models import load_model


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    # load_model, because GPT-2 comes with a dropout of 0.1
    return load_model(request.getfixturevalue(request.param))


def plain_logits(model, completions: Completions, row: int, temperature: float) -> torch.Tensor:
    """Logits of a completion's tokens from a forward of that one sequence without padding, in float64."""
    prompt = completions.prompt_ids[row][completions.prompt_mask[row].bool()]
    tokens = completions.ids[row][completions.mask[row]]
    logits = model(torch.cat([prompt, tokens])[None]).logits[0].double() / temperature
    return logits[len(prompt) - 1 : -1]


def plain_logprobs(model, completions: Completions, row: int, temperature: float) -> torch.Tensor:
    tokens = completions.ids[row][completions.mask[row]]
    logprobs = plain_logits(model, completions, row, temperature).log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), tokens]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_each_sequence_by_itself(model, temperature):
    completions = sample(model)
    scores = score(model, completions, temperature=temperature)
    assert scores.logits.shape[:2] == completions.ids.shape
    for row in range(len(completions.ids)):
        kept = int(completions.mask[row].sum())
        logits = plain_logits(model, completions, row, temperature)
        expected = plain_logprobs(model, completions, row, temperature)
        torch.testing.assert_close(scores.logprobs[row, :kept].double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            scores.logits[row, :kept].log_softmax(-1).double(), logits.log_softmax(-1), rtol=0, atol=1e-4
        )


def test_the_gradient_is_that_of_each_sequence_by_itself(model):
    completions = sample(model)
    weights = torch.randn(completions.ids.shape, generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    kept = torch.where(completions.mask, score(model, completions, temperature=0.9).logprobs, 0.0)
    ours = torch.autograd.grad((kept * weights).sum(), parameters)
    plain = sum(
        (plain_logprobs(model, completions, row, 0.9) * weights[row][completions.mask[row]].double()).sum()
        for row in range(len(kept))
    )
    theirs = torch.autograd.grad(plain, parameters)
    assert max(float(g.abs().max()) for g in theirs) > 0.1
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rollout", [{}, {"temperature": 0.7}])
def test_the_sampler_reports_what_scoring_finds(model, rollout):
    completions = sample(model, **rollout)
    scores = score(model, completions, temperature=rollout.get("temperature", 1.0))
    difference = (scores.logprobs - completions.sampler_logprobs)[completions.mask]
    assert difference.abs().max() <= 1e-5


def test_truncated_sampling_reports_higher_probabilities_than_the_policy_has(model):
    completions = sample(model, top_k=4)
    scores = score(model, completions, temperature=1.0)
    kept = scores.logits.log_softmax(-1).topk(4).values.logsumexp(-1)
    expected = (scores.logprobs - kept)[completions.mask]
    torch.testing.assert_close(completions.sampler_logprobs[completions.mask], expected, rtol=0, atol=1e-5)


def test_select_trims_padding_and_changes_no_score(model):
    completions = sample(model)
    whole = score(model, completions, temperature=1.0).logprobs
    lengths = completions.mask.sum(-1)
    rows = (lengths <= lengths.sort().values[2]).nonzero()[:, 0].tolist()
    rows = sorted(rows, key=lambda i: int(completions.prompt_mask[i].sum()))[:2]
    part = select(completions, torch.tensor(rows))
    assert part.ids.shape[1] == int(lengths[rows].max()) < completions.ids.shape[1]
    assert (
        part.prompt_ids.shape[1] == int(completions.prompt_mask[rows].sum(-1).max()) < completions.prompt_ids.shape[1]
    )
    scores = score(model, part, temperature=1.0).logprobs
    for i, row in enumerate(rows):
        kept = int(lengths[row])
        torch.testing.assert_close(scores[i, :kept], whole[row, :kept], rtol=0, atol=1e-5)
        assert part.ids[i, :kept].tolist() == completions.ids[row, :kept].tolist()
        assert torch.equal(part.sampler_logprobs[i, :kept], completions.sampler_logprobs[row, :kept])
        assert part.ended[i] == completions.ended[row]


def test_select_takes_slices_and_keeps_one_position_of_an_empty_part(model):
    completions = sample(model)
    part = select(completions, slice(2, 5))
    assert torch.equal(part.ended, completions.ended[2:5])
    nothing = Completions(**{**vars(completions), "mask": torch.zeros_like(completions.mask)})
    assert select(nothing, slice(0, 2)).ids.shape == (2, 1)


def test_an_adapter_is_scored_like_the_weights_it_merges_into():
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    disturb(model)
    completions = sample(model)
    with torch.no_grad():
        ours = score(model, completions, temperature=1.0).logprobs
        merged = model.merge_and_unload()
        for row in range(len(ours)):
            kept = int(completions.mask[row].sum())
            expected = plain_logprobs(merged, completions, row, 1.0)
            torch.testing.assert_close(ours[row, :kept].double(), expected, rtol=0, atol=1e-5)
    assert arithmetic_tokenizer().pad_token_id in completions.prompt_ids, "some prompts are padded"
