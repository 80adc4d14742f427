"""The plain score: what a forward of each sequence by itself says, gradient included; completions as tensors."""

import pytest
import torch
from tests.training.test_sampling import sample

from klamp.lab.models import load_model
from klamp.scoring.completions import Completions, select
from klamp.scoring.scorer import score


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


def three() -> Completions:
    """Prompts of 1, 3 and 2 tokens, completions of 2, 4 and 1 tokens; the second one was cut."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    return Completions(
        prompt_ids=torch.tensor([[0, 0, 5], [6, 7, 8], [0, 3, 4]]),
        prompt_mask=torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]),
        ids=torch.arange(12).view(3, 4),
        mask=mask,
        sampler_logprobs=-torch.arange(12.0).view(3, 4) * mask,
        ended=torch.tensor([True, False, True]),
    )


def test_rows_without_long_neighbours_lose_the_padding_of_all_of_them() -> None:
    found = select(three(), torch.tensor([0, 2]))
    assert found.prompt_ids.tolist() == [[0, 5], [3, 4]]
    assert found.prompt_mask.tolist() == [[0, 1], [1, 1]]
    assert found.ids.tolist() == [[0, 1], [8, 9]]
    assert found.mask.tolist() == [[True, True], [True, False]]
    assert found.sampler_logprobs.tolist() == [[0, -1], [-8, 0]]
    assert found.ended.tolist() == [True, True]
