"""Evaluation: greedy, every held-out prompt once, the same mean however many processes and batches."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from tests.training import rewards
from tests.training.test_own_answers import read_by_hand
from tests.training.test_rollouts import of_process
from transformers import GenerationConfig

from klamp.training import evaluation
from klamp.training.evaluation import evaluate


def by_hand(context) -> dict[str, float]:
    """Mean reward of what transformers' own greedy decoding writes, prompt by prompt."""
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
    assert evaluate(context).scores == pytest.approx(expected)
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert evaluate(context).scores == pytest.approx(expected)


def test_processes_share_the_prompts_and_leave_none_out(context_of):
    context = context_of(eval_size=7)
    expected, shares = by_hand(context), [evaluate(of_process(context, i, 2)).scores for i in range(2)]
    for skill in expected:
        assert (4 * shares[0][skill] + 3 * shares[1][skill]) / 7 == pytest.approx(expected[skill])


def test_more_processes_than_prompts_are_no_trouble(context_of):
    context = context_of(eval_size=1)
    assert evaluate(of_process(context, 2, 3)).scores == {"addition": 0.0, "subtraction": 0.0, "reversal": 0.0}


def test_a_skill_that_is_read_is_scored_by_the_probability_of_its_answers(context_of):
    context = context_of(eval_size=7, temperature=2.0)  # the temperature of sampling does not count here
    context.task = replace(context.task, read=frozenset({"reversal", "addition"}))
    expected = by_hand(context) | {
        skill: fmean(read_by_hand(context.policy, context.tokenizer, context.task.evaluation[skill]))
        for skill in ("reversal", "addition")
    }
    assert evaluate(context).scores == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["reversal"] != expected["addition"] < 1


def test_the_first_answers_of_each_skill_are_kept_with_their_questions(context_of):
    context = context_of(eval_size=7, log_answers=2)
    found = evaluate(context)
    assert [row["skill"] for row in found.answers] == [skill for skill in context.task.evaluation for _ in range(2)]
    for row, example in zip(
        found.answers, (e for rows in context.task.evaluation.values() for e in rows[:2]), strict=True
    ):
        assert row["question"] == example.question == example.prompt
        assert row["score"] == rewards.digits(str(row["completion"]))
    assert evaluate(context_of(eval_size=7, log_answers=0)).answers == []
