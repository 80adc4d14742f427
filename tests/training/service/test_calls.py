"""Completions, scores, evaluations and lengths through the service: the same numbers as a model here would give."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from tests.training.conftest import tiny_llama
from tests.training.test_evaluation import by_hand, read_by_hand

from klamp.errors import ModelError, NonFiniteError
from klamp.tinker.testing import Fault
from klamp.training.models import end_tokens
from klamp.training.references import FrozenReference
from klamp.training.service import calls, run

TEMPERATURE = 1.0


@pytest.fixture
def base(connection, client):
    return calls.TinkerReference(connection, client, "the base model")


@pytest.fixture
def completions(context, base):
    return calls.collect(context, base, context.task.train[:3], step=1)


def test_completions_are_groups_of_their_prompts(context, completions):
    prompts, responses = calls.token_lists(completions)
    for i, example in enumerate(context.task.train[:3]):
        ids = context.tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
        assert prompts[4 * i : 4 * i + 4] == [ids] * 4
    lengths = [len(response) for response in responses]
    assert len(responses) == 12
    assert min(lengths) < max(lengths) <= 6
    assert (completions.ids[~completions.mask] == context.pad).all()
    assert completions.ended.tolist() == [len(r) < 6 or context.tokenizer.decode(r[-1]) in "xyz-=" for r in responses]


def test_sampler_and_reference_give_what_a_frozen_model_here_gives(base, completions):
    expected = FrozenReference(tiny_llama()).score(completions, temperature=TEMPERATURE).logprobs
    found, mask = base.score(completions, temperature=TEMPERATURE), completions.mask
    for given in (found.logprobs, completions.sampler_logprobs):
        torch.testing.assert_close(given[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert (completions.sampler_logprobs[~mask] == 0).all()
    assert found.logits is None and base.weights() is None
    assert base.describe() == "the base model"


def test_draws_depend_on_seed_step_and_prompt_alone(context, base, completions):
    again = calls.collect(context, base, context.task.train[:3], step=1)
    assert again.ids.equal(completions.ids)
    other = calls.collect(context, base, context.task.train[:3], step=2)
    assert calls.token_lists(other)[1] != calls.token_lists(completions)[1]


def test_a_sampled_token_without_a_log_probability_stops(context, base, tiny):
    tiny.inject(Fault(kind="nan", route="asample", scoring=False))
    with pytest.raises(NonFiniteError, match="the sampler's log-probabilities"):
        calls.collect(context, base, context.task.train[:3], step=1)


def test_another_number_of_sequences_stops(connection, client):
    few = SimpleNamespace(sample=lambda **given: client.sample(**given | {"num_samples": 1}))
    with pytest.raises(ModelError, match="another number of sequences"):
        calls.TinkerReference(connection, few, "").sample([[1, 2]], count=2, seeds=[0], max_tokens=2)


def test_scores_are_those_of_greedy_completions(context, base):
    model = tiny_llama()
    here = SimpleNamespace(**vars(context), policy=model, stop=end_tokens(model, context.tokenizer))
    assert run.evaluate(context, base).scores == pytest.approx(by_hand(here))


def test_the_reference_length_is_the_mean_of_its_completions(context, base):
    context.reference = base
    run.measure_length(context)
    assert context.control.reference_length is not None
    assert 1.0 < context.control.reference_length < 6.0
    kept, context.control.reference_length = context.control.reference_length, 4.5
    run.measure_length(context)
    assert context.control.reference_length == 4.5
    context.control.reference_length = None
    run.measure_length(context)
    assert context.control.reference_length == kept


def test_a_skill_that_is_read_is_scored_at_the_service(context, base):
    kept, context.task = context.task, replace(context.task, read=frozenset({"reversal"}))
    try:
        found = run.evaluate(context, base).scores
    finally:
        context.task = kept
    expected = fmean(read_by_hand(tiny_llama(), context.tokenizer, kept.evaluation["reversal"]))
    assert found["reversal"] == pytest.approx(expected, rel=1e-5)
