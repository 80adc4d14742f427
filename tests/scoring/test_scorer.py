"""Scores and gradients of every way are those of a plain forward; rows, prompts and padding are computed once."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tests.training.conftest import disturb, sample
from transformers import AutoConfig, AutoModelForCausalLM

from klamp.core.estimators import exact_kl
from klamp.lab.models import load_model
from klamp.scoring import completions as passes
from klamp.scoring import scorer as scorer_module
from klamp.scoring.completions import Completions, PassPlan, bucketed, plan_of, run_rows, select
from klamp.scoring.model_parts import OpenedModel, Traits
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, ExactKL, Scorer, score

V, P, T = 50, 7, 6
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | options))).eval()


def adapted(target_modules: str | list[str]) -> Any:
    config = LoraConfig(r=3, target_modules=target_modules, task_type="CAUSAL_LM")
    model = get_peft_model(model_of("qwen2", tie_word_embeddings=True), config)
    disturb(model)
    return model.eval()


QWEN2 = "qwen2, tied, grouped keys"
GEMMA2 = {"sliding_window": 4, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
MODELS: dict[str, Callable[[], Any]] = {
    QWEN2: lambda: model_of("qwen2", tie_word_embeddings=True),
    "gpt2, absolute positions": lambda: model_of("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mistral, window of 4": lambda: model_of("mistral", sliding_window=4),
    "gemma2, window and cap": lambda: model_of("gemma2", **GEMMA2),
    "granite, scaled logits": lambda: model_of("granite", logits_scaling=2.5),
    "lora": lambda: adapted("all-linear"),
    "lora on the head": lambda: adapted(["lm_head", "q_proj"]),
}


def made(name: str) -> Any:
    return MODELS[name]()


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> Any:
    return made(request.param)


def completions(groups: int = 3, size: int = 4) -> Completions:
    """Groups of unequal completions; the prompts are padded on the left by 0, 3 and 5 columns."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, V, (groups, P), generator=generator)
    prompt_mask = (torch.arange(P) >= torch.tensor([0, 3, 5])[:groups, None]).long()
    rows = groups * size
    lengths = torch.randint(1, T + 1, (rows,), generator=generator)
    lengths[:2] = torch.tensor([T, 1])
    mask = torch.arange(T) < lengths[:, None]
    return Completions(
        prompt_ids=(prompts * prompt_mask).repeat_interleave(size, 0),
        prompt_mask=prompt_mask.repeat_interleave(size, 0),
        ids=torch.randint(1, V, (rows, T), generator=generator) * mask,
        mask=mask,
        sampler_logprobs=torch.zeros(mask.shape),
        ended=torch.ones(rows, dtype=torch.bool),
    )


def gradients(model, total: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def assert_same_gradient(found, expected) -> None:
    """In every weight, to 1e-5 of the largest entry of the whole gradient."""
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, scale))


WEIGHTS = torch.randn(12, T, generator=torch.Generator().manual_seed(1))


def plain(model, data: Completions, temperature: float = 0.9):
    scores = score(model, data, temperature=temperature)
    total = (torch.where(data.mask, scores.logprobs, 0.0) * WEIGHTS[: len(data.ids)]).sum()
    return scores, gradients(model, total)


PLANS = {
    "plain": PassPlan(shared=False, buckets=[list(range(12))]),
    "plain, by length": PassPlan(shared=False, buckets=[[0, 4, 7], [1, 2, 3, 5], [6, 8, 9, 10, 11]]),
    "shared": PassPlan(shared=True, buckets=[list(range(12))]),
    "shared, by length": PassPlan(shared=True, buckets=[[11, 0, 3], [1, 2, 4, 5, 6], [7, 8, 9, 10]]),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_way_gives_the_scores_and_the_gradient_of_a_plain_forward(model, monkeypatch, plan):
    data, traits = completions(), probe(model)
    assert traits.sharing == "gradient"
    expected, expected_gradient = plain(model, data)
    monkeypatch.setattr(scorer_module, "run_rows", lambda *a, **k: run_rows(*a, **(k | {"plan": PLANS[plan]})))
    scores = Scorer(model, traits)(data, Ask(temperature=0.9, entropy=True))
    torch.testing.assert_close(scores.logprobs[data.mask], expected.logprobs[data.mask], rtol=0, atol=1e-5)
    assert (scores.logprobs[~data.mask] == 0).all()
    entropy = torch.distributions.Categorical(logits=expected.logits.double()).entropy()[data.mask]
    torch.testing.assert_close(scores.entropy[data.mask].double(), entropy, rtol=0, atol=1e-5)
    assert not scores.entropy.requires_grad
    assert_same_gradient(gradients(model, (scores.logprobs * WEIGHTS).sum()), expected_gradient)


def test_rows_that_do_not_learn_have_their_scores_and_no_gradient():
    model, data = made(QWEN2), completions()
    learns = torch.arange(12) % 3 == 0
    scorer = Scorer(model, probe(model))
    scores = scorer(data, Ask(temperature=0.9, entropy=True, learns=learns))
    expected = score(model, data, temperature=0.9)
    torch.testing.assert_close(scores.logprobs[data.mask], expected.logprobs[data.mask], rtol=0, atol=1e-5)
    kept = torch.where(data.mask & learns[:, None], expected.logprobs, 0.0)
    assert_same_gradient(gradients(model, (scores.logprobs * WEIGHTS).sum()), gradients(model, (kept * WEIGHTS).sum()))


def test_where_no_row_learns_the_gradient_is_zero_in_every_weight():
    model, data = made(QWEN2), completions()
    nobody = torch.zeros(12, dtype=torch.bool)
    scores = Scorer(model, probe(model))(data, Ask(temperature=1.0, learns=nobody))
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_predictions_that_are_kept_have_their_gradient():
    model, data = made(QWEN2), completions()
    traits = probe(model)
    ask = Ask(temperature=1.0, keep=torch.ones(12, dtype=torch.bool))
    expected = gradients(model, Scorer(model, traits)(data, ask).logprobs[data.mask].sum())
    predictions = Scorer(model, traits)(data, ask).predictions
    assert predictions is not None
    values = predictions.values[data.mask]
    found = OpenedModel(model, traits).predictions(values).logits().log_softmax(-1)
    chosen = found.gather(-1, data.ids[data.mask][:, None])[:, 0]
    assert_same_gradient(gradients(model, chosen.sum()), expected)


def shapes_run(model: Any) -> list[tuple[int, int]]:
    """The shapes of the inputs that the model runs from now on."""
    shapes: list[tuple[int, int]] = []
    model.model.register_forward_hook(lambda m, a, k, out: shapes.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    return shapes


def test_known_scores_are_taken_and_not_computed():
    model, data = made(QWEN2), completions()
    scorer, learns = Scorer(model, probe(model)), torch.arange(12) < 5
    with torch.no_grad():
        before = scorer(data, Ask(temperature=1.0, entropy=True))
    marked = replace(before, logprobs=before.logprobs + 7.0)
    shapes = shapes_run(model)
    scores = scorer(data, Ask(temperature=1.0, entropy=True, learns=learns, known=marked))
    assert sum(rows for rows, _ in shapes) == 5
    torch.testing.assert_close(scores.logprobs[~learns], marked.logprobs[~learns], rtol=0, atol=0)
    kept = data.mask & learns[:, None]
    torch.testing.assert_close(scores.logprobs[kept], before.logprobs[kept], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy, before.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("learning", [(), ("reverse",), ("forward",)])
@pytest.mark.parametrize("name", [QWEN2, "gemma2, window and cap", "lora on the head"])
def test_the_exact_kl_is_that_of_the_logits_with_its_gradient(name, learning):
    policy, ref, data = made(name), made(name), completions()
    disturb(policy, size=0.1)
    rows = torch.arange(12) % 4 < 2
    with torch.no_grad():
        ref_scores = score(ref, data, temperature=0.8)
        kept = Scorer(ref, probe(ref))(data, Ask(temperature=0.8, keep=rows)).predictions
    scorer = Scorer(policy, probe(policy))
    assert (kept.head is None) == (name == "lora on the head")
    found = scorer(data, Ask(temperature=0.8, exact=ExactKL(rows=rows, ref=kept, learns=learning)))
    logits = score(policy, data, temperature=0.8).logits
    counted = data.mask & rows[:, None]
    for direction, ours in (("reverse", found.exact), ("forward", found.exact_forward)):
        expected = torch.where(counted, exact_kl(logits, ref_scores.logits, direction=direction), 0.0)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert expected.abs().max() > 0.1
        assert ours.requires_grad == (direction in learning)
        if direction in learning:
            assert_same_gradient(gradients(policy, ours.sum()), gradients(policy, expected.sum()))


def test_only_unmasked_tokens_reach_the_head(monkeypatch):
    seen = []
    usual = scorer_module.token_logprobs
    monkeypatch.setattr(scorer_module, "token_logprobs", lambda p, t, **k: seen.append(len(t)) or usual(p, t, **k))
    model, data = made(QWEN2), completions()
    Scorer(model, probe(model))(data, Ask(temperature=1.0))
    assert seen == [int(data.mask.sum())] and seen[0] < data.mask.numel() * 0.8


def test_checkpointed_activations_are_scored_the_plain_way():
    model, data = made(QWEN2), completions()
    _, expected_gradient = plain(model, data)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    traits = probe(model)
    assert traits == Traits(head=True, sharing="values") and model.training
    scorer = Scorer(model, traits)
    assert not scorer.can_share()
    scores = scorer(data, Ask(temperature=0.9))
    assert_same_gradient(gradients(model, (scores.logprobs * WEIGHTS).sum()), expected_gradient)
    with torch.no_grad():
        assert not scorer.can_share(), "in training mode the cache is taken away without gradient too"
        model.eval()
        assert scorer.can_share()


ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0},
    "dynamic": {"factor": 4.0},
}


def stretched(rope: str, length: int = 64) -> Any:
    """A model whose rotary frequencies change once a sequence of the pass is longer than `length`."""
    options = {"rope_type": rope, "rope_theta": 100.0, **ROPES[rope]}
    if rope == "longrope":
        options["original_max_position_embeddings"] = length
    return model_of("llama", max_position_embeddings=length, rope_parameters=options)


@pytest.mark.parametrize("rope", ROPES)
def test_where_frequencies_follow_the_length_long_rows_are_scored_with_their_prompt(monkeypatch, rope):
    """The probe's few tokens show nothing of it: a prompt run by itself would get the frequencies of a short row."""
    monkeypatch.setattr(passes, "PASS_TOKENS", 0)  # prompts are shared, and rows split by length, wherever that is less
    model, data = stretched(rope, length=P + 3), completions()
    traits = probe(model)
    assert traits == Traits(head=True, sharing="gradient")
    shapes = shapes_run(model)
    found = Scorer(model, traits)(data, Ask(temperature=0.9)).logprobs
    assert shapes == [(12, P + T - 1)]
    if rope == "longrope":  # dynamic frequencies differ with each token more, and the plain forward runs one more
        expected, expected_gradient = plain(model, data)
        torch.testing.assert_close(found[data.mask], expected.logprobs[data.mask], rtol=0, atol=1e-5)
        assert_same_gradient(gradients(model, (found * WEIGHTS).sum()), expected_gradient)
    assert OpenedModel(model, traits).is_steady(P + 3) and not OpenedModel(model, traits).is_steady(P + 4)
    assert OpenedModel(made(QWEN2), traits).is_steady(10**9)


def cost_of(buckets: list[list[int]], lengths: list[int], ahead: int, overhead: int) -> int:
    return sum(len(rows) * (ahead + max(lengths[i] for i in rows)) + overhead for rows in buckets)


def every_cut(lengths: list[int]):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for chosen in range(2 ** (len(order) - 1)):
        cuts = [0, *(i + 1 for i in range(len(order) - 1) if chosen >> i & 1), len(order)]
        yield [order[a:b] for a, b in pairwise(cuts)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 20), st.integers(0, 40))
def test_the_buckets_are_the_cheapest_of_all(lengths, ahead, overhead):
    buckets, cost = bucketed(lengths, ahead=ahead, overhead=overhead)
    assert sorted(i for rows in buckets for i in rows) == list(range(len(lengths)))
    assert cost == cost_of(buckets, lengths, ahead, overhead)
    assert cost == min(cost_of(cut, lengths, ahead, overhead) for cut in every_cut(lengths))


def test_prompts_are_shared_where_that_is_less_work():
    long = plan_of([64] * 16, prompts=2, prompt_length=512, can_share=True)
    assert long.shared and long.buckets == [list(range(16))]
    short = plan_of([64] * 16, prompts=2, prompt_length=8, can_share=True)
    assert not short.shared
    assert not plan_of([64] * 16, prompts=16, prompt_length=512, can_share=True).shared, "groups of one share nothing"
    assert not plan_of([64] * 16, prompts=2, prompt_length=512, can_share=False).shared
    assert plan_of([0, 1], prompts=1, prompt_length=4, can_share=True).buckets == [[0, 1]], "empty completions too"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def plain_model(request):
    # load_model, because GPT-2 comes with a dropout of 0.1
    return load_model(request.getfixturevalue(request.param))


def by_itself(plain_model, completions: Completions, row: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of all words, and of the tokens, from a forward of one sequence without padding, in float64."""
    prompt = completions.prompt_ids[row][completions.prompt_mask[row].bool()]
    tokens = completions.ids[row][completions.mask[row]]
    logits = plain_model(torch.cat([prompt, tokens])[None]).logits[0].double() / temperature
    words = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return words, words[torch.arange(len(tokens)), tokens]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_each_sequence_by_itself(plain_model, temperature):
    completions = sample(plain_model)
    scores = score(plain_model, completions, temperature=temperature)
    assert scores.logits.shape[:2] == completions.ids.shape
    for row in range(len(completions.ids)):
        words, tokens = by_itself(plain_model, completions, row, temperature)
        torch.testing.assert_close(scores.logprobs[row, : len(tokens)].double(), tokens, rtol=0, atol=1e-5)
        found = scores.logits[row, : len(tokens)].log_softmax(-1).double()
        torch.testing.assert_close(found, words, rtol=0, atol=1e-4)


def test_the_gradient_is_that_of_each_sequence_by_itself(plain_model):
    completions = sample(plain_model)
    weights = torch.randn(completions.ids.shape, generator=torch.Generator().manual_seed(0))
    parameters = list(plain_model.parameters())
    kept = torch.where(completions.mask, score(plain_model, completions, temperature=0.9).logprobs, 0.0)
    ours = torch.autograd.grad((kept * weights).sum(), parameters)
    rows = [by_itself(plain_model, completions, row, 0.9)[1] for row in range(len(kept))]
    theirs = torch.autograd.grad((torch.cat(rows) * weights[completions.mask].double()).sum(), parameters)
    assert max(float(g.abs().max()) for g in theirs) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rollout", [{}, {"temperature": 0.7}])
def test_the_sampler_reports_what_scoring_finds(plain_model, rollout):
    completions = sample(plain_model, **rollout)
    scores = score(plain_model, completions, temperature=rollout.get("temperature", 1.0))
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
