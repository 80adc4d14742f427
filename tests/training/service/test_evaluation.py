"""Scores and the reference's length, from the service's completions."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from tests.training.conftest import tiny_llama
from tests.training.test_evaluation import read_by_hand

from klamp.training.service import calls, run


def test_scores_are_those_of_greedy_completions(context, connection, client):
    found = run.evaluate(context, connection, client).scores
    model = tiny_llama()
    for skill, examples in context.task.evaluation.items():
        expected = []
        for example in examples:
            ids = context.tokenizer(example.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            out = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=context.pad)
            text = context.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            expected.append(context.task.score(example, text))
        assert found[skill] == pytest.approx(sum(expected) / len(expected))


def test_the_reference_length_is_the_mean_of_its_completions(context, connection, client):
    context.reference = calls.TinkerReference(connection, client, "the base model")
    run.measure_length(context, connection)
    assert context.control.reference_length is not None
    assert 1.0 < context.control.reference_length < 6.0
    kept, context.control.reference_length = context.control.reference_length, 4.5
    run.measure_length(context, connection)
    assert context.control.reference_length == 4.5
    context.control.reference_length = None
    run.measure_length(context, connection)
    assert context.control.reference_length == kept


def test_a_skill_that_is_read_is_scored_at_the_service(context, connection, client):
    kept, context.task = context.task, replace(context.task, read=frozenset({"reversal"}))
    try:
        found = run.evaluate(context, connection, client).scores
    finally:
        context.task = kept
    expected = fmean(read_by_hand(tiny_llama(), context.tokenizer, kept.evaluation["reversal"]))
    assert found["reversal"] == pytest.approx(expected, rel=1e-5)
