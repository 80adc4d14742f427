"""The plain score: what a forward of each sequence by itself says, gradient included; completions as tensors."""

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


def test_rows_may_be_a_slice_a_mask_or_in_another_order_and_without_a_token_one_column_stays() -> None:
    every = three()
    assert torch.equal(select(every, slice(0, 2)).ids, every.ids[:2])
    assert select(every, torch.tensor([2, 1, 1])).ids[:, 0].tolist() == [8, 4, 4]
    assert select(every, every.ended).ids.shape == (2, 2)
    nothing = Completions(**{**vars(every), "mask": torch.zeros(3, 4, dtype=torch.bool)})
    assert select(nothing, slice(None)).ids.shape == (3, 1)


def test_text_is_that_of_unmasked_tokens_without_the_special_ones() -> None:
    tokenizer = arithmetic_tokenizer()
    end = tokenizer.eos_token_id
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("42", "7"))
    ids = torch.tensor([[*first, end], [*second, end, first[0]]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    every = three()
    chosen = Completions(
        prompt_ids=every.prompt_ids[:2],
        prompt_mask=every.prompt_mask[:2],
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(2, 3),
        ended=mask.any(-1),
    )
    assert chosen.texts(tokenizer) == ["42", "7"]


def test_every_tensor_goes_to_the_device() -> None:
    moved = three().to(torch.device("meta"))
    assert {name: x.device.type for name, x in vars(moved).items()} == dict.fromkeys(vars(moved), "meta")
