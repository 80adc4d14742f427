"""Decoding by hand: the completions of transformers' `generate`, with every prompt run once and no ended row run on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.scoring.test_scorer import MODELS, made, stretched
from tests.training.conftest import disturb, tiny_llama
from tests.training.test_sampling import LENGTH, PROMPTS, tokens_of

from klamp.scoring.model_parts import Traits
from klamp.scoring.probe import probe
from klamp.scoring.scores import score
from klamp.tasks.arithmetic import arithmetic_tokenizer
from klamp.training import sampling
from klamp.training.config import RolloutConfig
from klamp.training.models import load_model
from klamp.training.sampling import decode, encode_prompts, generate, pays_to_drop, uniform_numbers


def sampled(model, traits, prompts, *, stop=(1, 7, 11, 20, 33), greedy=False, **rollout):
    """Completions of prompts, [rows, P] ids and mask."""
    settings = RolloutConfig(max_completion_length=LENGTH, **rollout)
    numbers = None if greedy else uniform_numbers(0, 0, len(prompts[0]), LENGTH)
    return generate(model, *prompts, rollout=settings, stop=stop, pad=0, uniforms=numbers, traits=traits)


def grouped(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = arithmetic_tokenizer()
    return encode_prompts([p for p in PROMPTS for _ in range(rows)], tokenizer, torch.device("cpu"))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}, {"greedy": True}])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_completions_are_those_of_generate(request, name, options):
    model = load_model(request.getfixturevalue(name))
    traits = probe(model)
    assert traits.sharing == "gradient"
    ours, theirs = (sampled(model, t, grouped(), **options) for t in (traits, None))
    assert tokens_of(ours) == tokens_of(theirs)
    assert options.get("greedy") or len({len(t) for t in tokens_of(ours)}) > 2
    assert torch.equal(ours.ended, theirs.ended)
    torch.testing.assert_close(
        ours.sampler_logprobs[ours.mask], theirs.sampler_logprobs[theirs.mask], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_windows_caps_scales_and_adapters_are_sampled_as_they_are_scored(name):
    model = made(name)
    ids = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) >= torch.tensor([0, 2, 4])[:, None]).long()
    prompts = (ids * mask).repeat_interleave(4, 0), mask.repeat_interleave(4, 0)
    found = sampled(model, probe(model), prompts)
    with torch.no_grad():
        expected = score(model, found, temperature=1.0).logprobs
    torch.testing.assert_close(found.sampler_logprobs[found.mask], expected[found.mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("length", [6 + LENGTH - 1, 6 + LENGTH])
def test_frequencies_that_follow_the_length_are_left_to_generate(monkeypatch, length):
    model, used = stretched("longrope", length=length), []
    ids = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0)).repeat_interleave(3, 0)
    monkeypatch.setattr(sampling, "decode", lambda *a, **k: used.append(1) or decode(*a, **k))
    expected = sampled(model, None, (ids, torch.ones_like(ids)))
    found = sampled(model, probe(model), (ids, torch.ones_like(ids)))
    assert tokens_of(found) == tokens_of(expected)
    assert bool(used) == (6 + LENGTH <= length)


def test_every_prompt_is_run_once_and_what_has_ended_no_more():
    model, seen = tiny_llama(), []
    handle = model.model.register_forward_hook(lambda m, a, k, out: seen.append(k["input_ids"].shape), with_kwargs=True)
    found = sampled(model, Traits(head=True, sharing="gradient"), grouped(4))
    handle.remove()
    assert seen[0] == (len(PROMPTS), found.prompt_ids.shape[1])
    steps = [rows for rows, tokens in seen[1:] if tokens == 1]
    assert len(steps) == len(seen) - 1 and steps[0] <= 32
    assert all(a >= b for a, b in pairwise(steps)) and steps[-1] < 32
    for t, rows in enumerate(steps):
        left = int(((found.mask.sum(-1) > t + 1) | ((found.mask.sum(-1) == t + 1) & ~found.ended)).sum())
        assert left <= rows and not pays_to_drop(left, rows)


def test_rows_are_dropped_a_quarter_at_a_time():
    assert not pays_to_drop(32, 32) and not pays_to_drop(25, 32) and pays_to_drop(24, 32) and pays_to_drop(1, 2)


def test_an_adapter_in_training_mode_with_checkpointing_is_sampled_with_its_cache():
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))
    disturb(model)
    expected = tokens_of(sampled(model, None, grouped(2)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    traits = probe(model)
    assert traits.sharing == "values"
    assert tokens_of(sampled(model, traits, grouped(2))) == expected
    assert model.training
