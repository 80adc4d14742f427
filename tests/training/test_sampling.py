"""Sampling: draws, caches, truncation; and rollouts: groups, rewards, lengths, exclusions."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tests.scoring.test_scorer import MODELS, made, stretched
from tests.training import rewards
from tests.training.conftest import CPU, LENGTH, PROMPTS, disturb, rollout_of, sample, tiny_llama
from torch.optim import SGD
from transformers import AutoModelForCausalLM, GenerationConfig

from klamp.config.kl import SMALL_VOCABULARY
from klamp.lab import sampling
from klamp.lab.config import RolloutConfig
from klamp.lab.models import load_model
from klamp.lab.rollouts import collect, measure_reference_length
from klamp.lab.sampling import InverseSampler, decode, draw, encode_prompts, generate, uniform_numbers, warpers_of
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.lab.updates import update
from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import Traits
from klamp.scoring.probe import probe
from klamp.scoring.scorer import score


def tokens_of(completions: Completions) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(completions.ids, completions.mask, strict=True)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(request.getfixturevalue(request.param)).eval()


def drawn_by_hand(model, row: int, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """The draws at a prompt's own numbers, each after the tokens before it; and the tokens' log-probabilities."""
    prompt = arithmetic_tokenizer()(PROMPTS[row])["input_ids"]
    uniforms = uniform_numbers(0, 0, len(PROMPTS), LENGTH)[row, : len(tokens), None]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double() / 0.8
    draws = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniforms, right=True)[:, 0]
    return draws.tolist(), logits.log_softmax(-1).gather(-1, draws[:, None])[:, 0]


@pytest.mark.parametrize(
    ("batches", "extra_padding"),
    [([[*range(8)]], 0), ([[0, 1, 2], [3, 4, 5, 6, 7]], 3), ([[i] for i in range(8)], 0), ([[7, 2, 5, 0], [6, 4]], 0)],
)
def test_each_token_is_the_draw_of_a_plain_forward_at_its_own_number_in_any_batch(model, batches, extra_padding):
    seen = []
    for rows in batches:
        part = sample(model, rows=rows, extra_padding=extra_padding, temperature=0.8)
        for row, tokens, logprobs in zip(rows, tokens_of(part), part.sampler_logprobs, strict=True):
            expected, expected_logprobs = drawn_by_hand(model, row, tokens)
            assert tokens == expected
            torch.testing.assert_close(logprobs[: len(tokens)].double(), expected_logprobs, rtol=0, atol=1e-5)
            seen.append(tuple(tokens))
    assert len({*seen}) > 4 and len({*map(len, seen)}) > 2, "the draws and their lengths differ"


def loud(model):
    model.generation_config = GenerationConfig(
        repetition_penalty=9.0,
        forced_eos_token_id=1,
        suppress_tokens=list(range(2, 12)),
        no_repeat_ngram_size=1,
        max_length=3,
        min_new_tokens=7,
        temperature=0.01,
        do_sample=True,
        eos_token_id=model.generation_config.eos_token_id,
    )
    return model


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_models_own_generation_settings_are_neither_used_nor_lost(adapter, greedy):
    def wrapped(model):
        return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")) if adapter else model

    quiet, model = wrapped(tiny_llama()), wrapped(loud(tiny_llama()))
    base = model.get_base_model() if adapter else model
    kept, before = base.generation_config, base.generation_config.to_dict()
    assert tokens_of(sample(model, greedy=greedy)) == tokens_of(sample(quiet, greedy=greedy))
    assert base.generation_config is kept and kept.to_dict() == before


def test_every_epoch_holds_every_prompt_once():
    picked = [row for step in range(10) for row in sampling.examples_of_step(step, 10, size=3, seed=0)]
    epochs = [picked[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(sampling.examples_of_step(0, 2, size=5, seed=0)[:4]) == [0, 0, 1, 1], "a step of more than there are"
    assert sampling.examples_of_step(4, 100, size=9, seed=0) == sampling.examples_of_step(4, 100, size=9, seed=0)
    assert sampling.examples_of_step(4, 100, size=9, seed=0) != sampling.examples_of_step(4, 100, size=9, seed=1)


def drawn(scores: torch.Tensor, uniforms: torch.Tensor, **rollout: float) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = InverseSampler(uniforms[:, None], 3, RolloutConfig(**rollout))
    rows = scores.expand(len(uniforms), -1)
    only = sampler(torch.zeros(len(uniforms), 3, dtype=torch.long), rows)
    assert (only.isfinite().sum(-1) == 1).all()
    return only.argmax(-1), sampler.logprobs[0][:, 0]


@pytest.mark.parametrize(("rollout", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.6}, 2), ({"top_k": 2, "top_p": 0.9}, 2)])
def test_truncation_keeps_the_likeliest_tokens_and_renormalises(rollout, kept):
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    tokens, logprobs = drawn(probs.log()[None], torch.linspace(0, 1, 501, dtype=torch.float64)[:-1], **rollout)
    best = probs.argsort(descending=True)[:kept]
    assert set(tokens.tolist()) == set(best.tolist())
    torch.testing.assert_close(logprobs.exp(), probs[tokens] / probs[best].sum())


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 773), seed=st.integers(0, 10**6), spread=st.floats(0.1, 30), gaps=st.booleans())
def test_a_draw_inverts_the_cumulative_distribution(size, seed, spread, gaps):
    """Against the whole cumulative sum in float64, at numbers well inside a token's interval and at its very ends."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, size, generator=generator) * spread
    if gaps:
        scores[0, torch.rand(size, generator=generator) < 0.7] = -torch.inf
        scores[0, int(torch.randint(size, (1,), generator=generator))] = 0.0
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(scores.expand(40, -1), uniforms, temperature=1.0, warpers=warpers_of(RolloutConfig()))
    probs = scores[0].double().softmax(-1)
    cumulative = probs.cumsum(-1)
    assert (scores[0, tokens] > -torch.inf).all(), "no impossible token"
    torch.testing.assert_close(logprobs.double(), probs[tokens].log(), rtol=0, atol=2e-5)
    low, high = cumulative[tokens] - probs[tokens], cumulative[tokens]
    assert ((low - 1e-6 <= uniforms) & (uniforms <= high + 1e-6)).all()


def sampled(model, traits, prompts, *, stop=(1, 7, 11, 20, 33), greedy=False, **rollout):
    settings = RolloutConfig(max_completion_length=LENGTH, **rollout)
    numbers = None if greedy else uniform_numbers(0, 0, len(prompts[0]), LENGTH)
    return generate(model, *prompts, rollout=settings, stop=stop, pad=0, uniforms=numbers, traits=traits)


def grouped(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return encode_prompts([p for p in PROMPTS for _ in range(rows)], arithmetic_tokenizer(), CPU)


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
        assert 0.75 * rows < left <= rows, "rows are dropped a quarter at a time"


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


def test_groups_stand_together_and_every_completion_has_its_own_reward(context_with):
    context = context_with()
    rollout = rollout_of(context, beta=0.1)
    assert [e.prompt for e in rollout.examples] == [e.prompt for e in context.task.train[:3] for _ in range(4)]
    assert rollout.rewards.tolist() == pytest.approx([rewards.digits(text) for text in rollout.texts])
    assert rollout.rewards.std() > 0
    for start in range(0, 12, 4):
        group, advantages = rollout.rewards[start : start + 4], rollout.advantages[start : start + 4]
        expected = group - (group.sum() - group) / 3  # against the mean of the others
        torch.testing.assert_close(advantages, expected)
    tokens = sum(len(t) for t in tokens_of(rollout.completions))
    assert (rollout.totals.sequences, rollout.totals.tokens, rollout.totals.kl_tokens) == (12, tokens, tokens)


def test_truncated_completions_can_be_left_out(context_with):
    rollout = rollout_of(context_with(mask_truncated_completions=True), beta=0.1)
    ended = rollout.completions.ended
    assert 0 < ended.sum() < 12
    assert torch.equal(rollout.mask, rollout.completions.mask & ended[:, None])
    assert rollout.totals.tokens == rollout.completions.mask[ended].sum()
    assert rollout.totals.sequences == 12
    everything = rollout_of(context_with(), beta=0.1)
    assert torch.equal(everything.mask, everything.completions.mask)


def test_reference_lengths_come_with_the_prompts_or_from_the_run(context_with):
    for changes, expected in (({}, [9.0] * 4 + [1.0] * 4 + [2.0] * 4), ({"kl_reference_length": 7}, [7.0] * 12)):
        context = context_with(kl_clip_method="hard", kl_clip_threshold=0.1, **changes)
        context.control.reference_length = 9.0
        examples = [replace(e, reference_length=n) for e, n in zip(context.task.train, (None, 1, 2), strict=False)]
        rollout = collect(context, examples, step=0, terms=context.objective.weighted(0.1).terms)
        assert rollout.reference_length.tolist() == expected, "the user's number comes first, as in every host"


def test_excluded_tokens_leave_the_kl_and_stay_in_the_loss(context_with):
    rollout = rollout_of(context_with(kl_exclude_tokens=(5, 9)), beta=0.1)
    ids = rollout.completions.ids
    assert torch.equal(rollout.kl_mask, rollout.mask & (ids != 5) & (ids != 9))
    assert 0 < rollout.kl_mask.sum() < rollout.mask.sum()
    assert float(rollout.totals.tokens) == float(rollout.mask.sum())
    assert float(rollout.totals.kl_tokens) == float(rollout.kl_mask.sum())


CLIP = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


def by_hand(context, model) -> float:
    rollout, lengths = context.config.rollout, []
    prompts = [e.prompt for e in context.task.train[:64]]
    uniforms = uniform_numbers(context.config.run.seed, -1, len(prompts), rollout.max_completion_length)
    for prompt, row in zip(prompts, uniforms, strict=True):
        ids, mask = encode_prompts([prompt], context.tokenizer, context.device)
        drawn = generate(model, ids, mask, rollout=rollout, stop=context.stop, pad=context.pad, uniforms=row[None])
        lengths += drawn.mask.sum(-1).tolist()
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("changes", [{}, {"lora_r": 2}])
def test_it_is_the_mean_length_of_the_reference_not_of_the_policy(context_of, changes):
    context = context_of(**CLIP, **changes, max_completion_length=12, train_size=12)
    disturb(context.policy, size=0.2)
    measure_reference_length(context)
    with context.reference.sampling_model() as model:
        expected = by_hand(context, model)
    assert context.control.reference_length == pytest.approx(expected)
    assert context.control.reference_length != pytest.approx(by_hand(context, context.policy)), "it writes otherwise"


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, None),
        ({**CLIP, "use_per_token_kl_threshold": False}, None),
        ({**CLIP, "kl_reference_length": 7}, 7),
        ({**CLIP, "beta": 0.0}, None),
        (CLIP, 3.25),
    ],
)
def test_it_is_measured_once_and_only_where_a_budget_needs_it(context_with, changes, length):
    context = context_with(**changes)
    context.control.reference_length = length
    measure_reference_length(context)
    assert context.control.reference_length == length


@pytest.mark.parametrize(("rows", "parts"), [(12, 1), (12, 5), (12, 12), (7, 3), (3, 8), (1, 4), (3, 2**40)])
def test_parts_cover_every_row_once_in_order_and_near_equal(context_with, rows, parts):
    context = context_with(gradient_accumulation_steps=parts)
    slices = list(context.parts(rows))
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in slices]
    assert len(sizes) == min(rows, parts)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("changes", "vocabulary", "both"),
    [
        ({}, SMALL_VOCABULARY, True),
        ({}, SMALL_VOCABULARY + 1, False),
        ({"exact_kl_completions": 1}, SMALL_VOCABULARY + 1, True),
        ({"kl_estimator": "exact"}, SMALL_VOCABULARY + 1, False),
        ({"kl_estimator": "exact", "kl_gradient": "forward"}, SMALL_VOCABULARY + 1, True),
    ],
)
def test_the_forward_kl_of_a_large_vocabulary_is_measured_where_it_is_asked_for(context_of, changes, vocabulary, both):
    context = context_of(beta=0.1, **changes)
    context.vocabulary = vocabulary
    assert context.exact_directions == (("reverse", "forward") if both else ("reverse",))
    rollout = rollout_of(context, beta=0.1)
    output = update(context, SGD(context.policy.parameters(), lr=0.0), rollout, context.objective)
    assert output.scores.exact is not None and (output.scores.exact_forward is not None) == both


def test_the_distance_from_the_old_policy_is_k3_of_what_sampled(context_of):
    """KL(old||policy), and not the other way round: k3 of log old - log policy, over the trained tokens."""
    context = context_of(num_iterations=2)
    rollout = rollout_of(context, beta=0.1)
    old = rollout.completions.sampler_logprobs - 0.5
    output = update(
        context, SGD(context.policy.parameters(), lr=0.0), replace(rollout, old_logprobs=old), context.objective
    )
    moved = (output.scores.logprobs - old)[rollout.mask]
    assert output.losses["policy/kl_old"] == pytest.approx((moved.exp() - 1 - moved).mean().item(), rel=1e-5)
