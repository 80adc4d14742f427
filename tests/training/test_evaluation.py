"""Evaluation: greedy, every held-out prompt once, the same mean however many batches."""

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.training import rewards
from transformers import GenerationConfig

from klamp.lab import evaluation
from klamp.lab.evaluation import evaluate


def by_hand(context) -> dict[str, float]:
    settings = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=context.stop, pad_token_id=context.pad)
    found = {}
    for skill, examples in context.task.evaluation.items():
        scores = []
        for example in examples:
            ids = context.tokenizer(example.prompt, return_tensors="pt")["input_ids"]
            out = context.policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            scores.append(rewards.digits(context.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
        found[skill] = sum(scores) / len(scores)
    return found


def test_every_skill_is_scored_as_greedy_decoding_of_each_prompt_scores(context_of, monkeypatch):
    context = context_of(eval_size=7, temperature=2.0)
    expected = by_hand(context)
    assert list(expected) == ["addition", "subtraction", "reversal"]
    assert len(set(expected.values())) > 1
    assert evaluate(context)[0] == pytest.approx(expected)
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert evaluate(context)[0] == pytest.approx(expected)


def test_a_skill_that_is_read_is_scored_by_the_probability_of_its_answers(context_of, monkeypatch):
    context = context_of(eval_size=7, temperature=2.0)  # the temperature of sampling does not count here
    context.task = replace(context.task, read=frozenset({"reversal", "addition"}))
    expected = by_hand(context) | {
        skill: fmean(read_by_hand(context.policy, context.tokenizer, context.task.evaluation[skill]))
        for skill in ("reversal", "addition")
    }
    for at_once in (16, 2, 1):
        monkeypatch.setattr(evaluation, "READ_AT_ONCE", at_once)
        assert evaluate(context)[0] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["reversal"] != expected["addition"] < 1


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
