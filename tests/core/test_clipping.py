"""Clipping and budgets: held values, gates that are derivatives, the softplus that is no clip, the relu that leaks."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from klamp.core.clipping import clip_gate, clip_kl, gate_kl, kl_budget
from klamp.core.term import Gate
from klamp.errors import ShapeError


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_hard_clipping_is_relu_of_the_excess_and_its_gate_is_shut_up_to_the_threshold():
    assert clip_kl(double(0.2, 0.5, 0.9, 3.0), 0.5, method="hard").tolist() == pytest.approx([0, 0, 0.4, 2.5])
    assert clip_gate(double(0.0, 0.499, 0.5, 0.501, 9.0), 0.5, method="hard").tolist() == [0, 0, 0, 1, 1]
    assert clip_gate(double(-0.1, 0.0, 0.2), 0.0, method="hard").tolist() == [1, 1, 1], "a clip at zero is no clip"
    each = double(3.0, 3.0), double(1.0, 5.0)
    assert clip_kl(*each, method="hard").tolist() == [2.0, 0.0], "one threshold per sequence"
    assert clip_gate(*each, method="hard").tolist() == [1.0, 0.0]


def test_soft_clipping_with_a_temperature_is_a_scaled_softplus_and_method_none_is_no_clip():
    clipped = clip_kl(double(0.7), 0.5, method="soft", temperature=0.05).item()
    assert clipped == pytest.approx(0.05 * math.log1p(math.exp(0.2 / 0.05)), abs=1e-14)
    kl = double(-0.3, 0.0, 7.0)
    assert torch.equal(clip_kl(kl, 0.5, method="none"), kl)
    assert (clip_gate(kl, 0.5, method="none") == 1).all()


@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize("method", ["none", "hard", "soft"])
@settings(max_examples=25)
@given(kl=st.floats(-5, 200, allow_subnormal=False), threshold=st.floats(0.01, 10))
def test_the_gate_is_the_derivative_of_the_clipped_kl(method, temperature, kl, threshold):
    assume(kl != threshold)  # the kink has no derivative
    point = double(kl).requires_grad_(True)
    clipped = clip_kl(point, threshold, method=method, temperature=temperature)
    (slope,) = torch.autograd.grad(clipped.sum(), point)
    gate = clip_gate(point, threshold, method=method, temperature=temperature)
    assert slope.item() == pytest.approx(gate.item(), abs=1e-8)  # torch calls softplus linear past 20
    assert not gate.requires_grad


def test_a_budget_is_the_threshold_or_that_times_the_reference_length():
    assert kl_budget(5.0, per_token=False, reference_length=50) == 5.0
    assert kl_budget(0.1, per_token=True, reference_length=50) == pytest.approx(5.0)
    of_prompts = kl_budget(0.1, per_token=True, reference_length=torch.tensor([50, 100]))
    assert of_prompts.tolist() == pytest.approx([5.0, 10.0], abs=1e-6)


@pytest.mark.parametrize("size", [None, 3])
def test_a_gate_over_groups_needs_whole_ones(size: int | None) -> None:
    with pytest.raises(ShapeError, match="whole number of groups"):
        gate_kl(torch.ones(4), level="group", group_size=size, own=True)
    assert gate_kl(torch.arange(4.0), level="group", group_size=2, own=True).tolist() == [0.5, 0.5, 2.5, 2.5]


def test_at_temperature_one_a_per_token_threshold_halves_beta_instead_of_clipping():
    gate = clip_gate(double(0.0, 0.1), 0.05, method="soft")
    assert gate.tolist() == pytest.approx([0.4875, 0.5125], abs=5e-6)


def test_filler_tokens_buy_no_budget():
    per_token_kl = double(*[0.2] * 50)
    short, long = per_token_kl.sum(), per_token_kl.sum() + 0.0 * 500
    budget = kl_budget(0.1, per_token=True, reference_length=50)
    assert clip_kl(short, budget, method="hard") == clip_kl(long, budget, method="hard") > 4.9
    generated = kl_budget(0.1, per_token=True, reference_length=550)
    assert clip_kl(long, generated, method="hard") == 0.0


@pytest.mark.parametrize("method", ["hard", "soft"])
def test_tokens_sum_to_the_clipped_kl_of_their_completion(method):
    tokens = double(0.5, -0.2, 0.4, 7.0)[None].expand(3, 4) * double(1.0, 2.0, 0.1)[:, None]
    mask = torch.tensor([True, True, True, False]).expand(3, 4)
    kl, limit = (tokens * mask).sum(-1), double(0.3, 0.3, 0.3)
    parts = (clip(kl, limit, method=method, temperature=0.2) for clip in (clip_gate, clip_kl))
    value = Gate(kl, limit, *parts).apply(tokens * mask, mask)
    assert torch.allclose(value.sum(-1), clip_kl(kl, limit, method=method, temperature=0.2), rtol=0, atol=1e-14)
    assert (value[:, 3] == 0).all()
