"""Draws: the inverse of the cumulative distribution, whatever the size of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klamp.training.config import RolloutConfig
from klamp.training.sampling import BLOCK, InverseSampler, draw, warpers_of


def drawn(scores: torch.Tensor, uniforms: torch.Tensor, **rollout: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities for one row of scores at many uniform numbers."""
    sampler = InverseSampler(uniforms[:, None], 3, RolloutConfig(**rollout))
    rows = scores.expand(len(uniforms), -1)
    only = sampler(torch.zeros(len(uniforms), 3, dtype=torch.long), rows)
    assert (only.isfinite().sum(-1) == 1).all()
    return only.argmax(-1), sampler.logprobs[0][:, 0]


def test_a_token_is_the_inverse_of_the_cumulative_distribution():
    never = -torch.inf
    scores = torch.tensor([[never, 0.3, -2.0, never, never, 1.1, -30.0, 0.0, never]])
    probs = scores.double().softmax(-1)[0].tolist()
    grid = torch.cat([torch.linspace(0, 1, 997, dtype=torch.float64)[:-1], torch.tensor([1e-300, 1 - 2**-53])])
    tokens, logprobs = drawn(scores, grid)
    checked = 0
    for u, token, logprob in zip(grid.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        below = sum(probs[:token])
        assert below - 1e-6 <= u <= below + probs[token] + 1e-6
        assert logprob == pytest.approx(float(scores[0].double().log_softmax(-1)[token]), abs=1e-6)
        checked += below + 1e-6 < u < below + probs[token] - 1e-6
    assert checked > 980, "nearly every number lies well inside its token's interval"


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (5e-324, 1), (1 - 2**-53, 6)])
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(u, token):
    scores = torch.tensor([[-torch.inf, 0.0, 2.0, -torch.inf, 1.0, -1.0, 0.5, -torch.inf, -torch.inf]])
    tokens, logprobs = drawn(scores, torch.tensor([u], dtype=torch.float64))
    assert tokens.tolist() == [token]
    assert logprobs.isfinite().all()


def test_evenly_spread_numbers_draw_every_token_in_proportion():
    scores = torch.randn(1, 42, generator=torch.Generator().manual_seed(3)) * 2
    n = 20_000
    tokens, _ = drawn(scores, (torch.arange(n, dtype=torch.float64) + 0.5) / n, temperature=0.7)
    expected = n * (scores[0].double() / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=42)
    assert ((counts - expected).abs() <= 1.01).all(), "a count is off its share by at most one draw"


@pytest.mark.parametrize(("rollout", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.6}, 2), ({"top_k": 2, "top_p": 0.9}, 2)])
def test_truncation_keeps_the_likeliest_tokens_and_renormalises(rollout, kept):
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    tokens, logprobs = drawn(probs.log()[None], torch.linspace(0, 1, 501, dtype=torch.float64)[:-1], **rollout)
    best = probs.argsort(descending=True)[:kept]
    assert set(tokens.tolist()) == set(best.tolist())
    torch.testing.assert_close(logprobs.exp(), probs[tokens] / probs[best].sum())


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3 * BLOCK + 5), seed=st.integers(0, 10**6), spread=st.floats(0.1, 30), gaps=st.booleans())
def test_blocks_of_the_vocabulary_change_no_draw(size, seed, spread, gaps):
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
