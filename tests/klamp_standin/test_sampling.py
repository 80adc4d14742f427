"""Sampling and scoring: draws follow the distribution, log-probabilities are those of the model, stops stop."""

import inspect

import pytest
import tinker
import torch

from klamp_standin import sampling, tiny_model

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model():
    return tiny_model(8)


def params(*, end=(), longest=64, seed=0, **given):
    return sampling.SamplingParams.read({"max_tokens": 4} | given, end=end, seed=seed, longest=longest)


def draw(model, count, **given):
    out = sampling.read(model, PROMPT)
    return sampling.sample(model, out, count, params(**given), lambda ids: "".join(chr(97 + i) for i in ids))


def distribution(model, tokens):
    return model(torch.tensor([tokens])).logits[0, -1].detach().double().log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution(model, temperature):
    count = 20_000
    rows = draw(model, count, max_tokens=1, temperature=temperature)
    expected = (distribution(model, PROMPT) / temperature).softmax(-1)
    found = torch.bincount(torch.tensor([row[0] for row, *_ in rows]), minlength=8) / count
    errors = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() < 5 * errors).all()


def test_log_probabilities_are_those_of_the_model_at_any_temperature(model):
    for temperature in (1.0, 0.3, 0.0):
        ((tokens, logprobs, _),) = draw(model, 1, temperature=temperature)
        for i, token in enumerate(tokens):
            expected = distribution(model, [*PROMPT, *tokens[:i]])[token]
            assert logprobs[i] == pytest.approx(float(expected), abs=1e-5)


def test_truncation_leaves_the_likeliest(model):
    likeliest = set(distribution(model, PROMPT).topk(2).indices.tolist())
    assert {row[0] for row, *_ in draw(model, 500, max_tokens=1, top_k=2)} == likeliest
    ranked = distribution(model, PROMPT).exp().sort(descending=True)
    nucleus = set(ranked.indices[: int((ranked.values.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert {row[0] for row, *_ in draw(model, 2000, max_tokens=1, top_p=0.5)} == nucleus


def test_end_tokens_and_stops_end_a_sequence(model):
    for given in ({"end": range(8)}, {"stop": list(range(8))}):
        assert all(len(tokens) == 1 and ended for tokens, _, ended in draw(model, 4, **given))
    rows = draw(model, 200, max_tokens=8, stop="a")
    texts = ["".join(chr(97 + i) for i in tokens) for tokens, *_ in rows]
    assert any(ended for *_, ended in rows)
    for text, (*_, ended) in zip(texts, rows, strict=True):
        assert ended == text.endswith("a")
        assert "a" not in text[:-1]
        assert ended or len(text) == 8
    assert all(len(tokens) == 4 and not ended for tokens, _, ended in draw(model, 4, end=range(8), stop=[]))


@pytest.mark.parametrize("last", [None, 2])
@pytest.mark.parametrize("k", [1, 3, 70])
def test_the_likeliest_tokens_at_each_place_of_a_prompt(reference, k, last):
    """As the SDK hands them out: pairs by rank, None where nothing stands before or nothing was asked for."""
    tokens, base = [1, 2, 3, 4, 5], tiny_model()
    suffix = {} if last is None else {"prompt_logprobs_last_n": last}
    if not suffix.keys() <= inspect.signature(reference.sample).parameters.keys():
        pytest.skip("this version of the SDK scores no suffix")
    answer = reference.sample(
        prompt=tinker.ModelInput.from_ints(tokens),
        num_samples=1,
        sampling_params=tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
        **suffix,
    ).result()
    found, count = answer.topk_prompt_logprobs, min(k, 64)
    assert len(found) == 5
    assert [place is None for place in found] == [i < (1 if last is None else 5 - last) for i in range(5)]
    assert [x is None for x in answer.prompt_logprobs] == [place is None for place in found]
    for i, place in enumerate(found):
        if place is not None:
            expected = distribution(base, tokens[:i]).topk(count)
            assert [token for token, _ in place] == expected.indices.tolist()
            assert [x for _, x in place] == pytest.approx(expected.values.tolist(), abs=1e-5)
