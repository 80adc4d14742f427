"""Answers that are read: the probability of their tokens, whatever stands in the same batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.training.conftest import tiny_llama

from klamp.scoring.scores import score
from klamp.tasks import Example, arithmetic_tokenizer
from klamp.training.evaluation import answers_as_completions, probabilities

EXAMPLES = [
    Example(prompt="47+85=", answer="132"),
    Example(prompt="rev abcd=", answer="dcba"),
    Example(prompt="a", answer="b"),
]


def read_by_hand(model: Any, tokenizer: Any, examples: Any) -> list[float]:
    """exp(mean log-probability of the answer's tokens) of each example, one forward pass each."""
    found = []
    for example in examples:
        prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (example.prompt, example.answer)
        )
        logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        each = [logprobs[len(prompt) + place - 1, token].item() for place, token in enumerate(answer)]
        found.append(math.exp(sum(each) / len(each)))
    return found


def test_they_are_the_geometric_means_of_the_tokens_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama(), arithmetic_tokenizer()

    def logprobs(given: Any) -> torch.Tensor:
        return score(model, given, temperature=1.0).logprobs

    expected = read_by_hand(model, tokenizer, EXAMPLES)
    for at_once in (16, 2, 1):
        monkeypatch.setattr("klamp.training.evaluation.READ_AT_ONCE", at_once)
        found = probabilities(EXAMPLES, tokenizer, torch.device("cpu"), logprobs)
        assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 3 and all(0 < value < 1 for value in expected)
    assert probabilities([], tokenizer, torch.device("cpu"), logprobs) == []


def test_a_certain_answer_has_probability_one() -> None:
    found = probabilities(
        EXAMPLES, arithmetic_tokenizer(), torch.device("cpu"), lambda given: torch.where(given.mask, 0.0, torch.nan)
    )
    assert found == [1.0, 1.0, 1.0], "what stands in the padding does not count"


def test_answers_are_tokens_without_an_end() -> None:
    tokenizer = arithmetic_tokenizer()
    given = answers_as_completions(EXAMPLES, tokenizer, torch.device("cpu"))
    assert given.mask.sum(-1).tolist() == [3, 4, 1] and given.ids.shape == (3, 4)
    assert given.texts(tokenizer) == ["132", "dcba", "b"]
    assert given.prompt_mask.sum(-1).tolist() == [6, 9, 1]
