"""The exact KL without logits: equal to `exact_kl` in value and gradient, never negative, in bounded memory."""

import math

import pytest
import torch
from tests.core.heads.naive import DIRECTIONS, LOW, OPTIONS, agree, close, copies, head, kl_inputs, naive_kl, poisoned

from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl


def biases(v=23, *, seed=3):
    random = torch.Generator().manual_seed(seed)
    policy_bias, ref_bias = torch.randn(2, v, generator=random, dtype=torch.float64)
    return {"policy_bias": policy_bias.clone().requires_grad_(True), "ref_bias": ref_bias.clone().requires_grad_(True)}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_kl_is_exact_kl_in_value_and_gradient(any_tiles, direction, options, with_bias):
    given, bias = kl_inputs(), biases() if with_bias else {}
    learned = [*given[:2], *([bias["policy_bias"]] if with_bias else [])]
    ours, naive = (f(*given, direction=direction, **options, **bias) for f in (linear_kl, naive_kl))
    assert agree(ours, naive, learned)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_entries_that_both_biases_forbid_have_no_part_in_the_kl(any_tiles, direction):
    hidden, weight, ref_hidden, ref_weight = kl_inputs()
    shut = {name: x.detach().index_fill(0, torch.arange(7, 23), -math.inf) for name, x in biases().items()}
    ours = linear_kl(hidden, weight, ref_hidden, ref_weight, direction=direction, **shut)
    few = {name: x[:7] for name, x in shut.items()}
    truth = naive_kl(hidden, weight[:7], ref_hidden, ref_weight[:7], direction, **few)
    assert agree(ours, truth, (hidden, weight))


def test_what_the_policy_alone_forbids_costs_nothing_of_its_own(any_tiles):
    """The policy's mass is on the others, the reference's everywhere: KL(policy || ref) and its slope are finite."""
    hidden, weight, ref_hidden, ref_weight = kl_inputs()
    bias = torch.zeros(23, dtype=torch.float64).index_fill(0, torch.arange(7, 23), -math.inf)
    ours = linear_kl(hidden, weight, ref_hidden, ref_weight, policy_bias=bias)
    log_p = (hidden @ weight[:7].t()).log_softmax(-1)
    log_q = (ref_hidden @ ref_weight.t()).log_softmax(-1)[:, :7]
    truth = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert agree(ours, truth, (hidden, weight))


@pytest.mark.parametrize("shift", [0.0, -5000.0])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_the_reference_forbids_costs_nothing_where_the_policy_never_goes(any_tiles, direction, shift):
    """Its probability rounds to 0, whatever all logits are shifted by."""
    hidden, weight, ref_hidden, ref_weight = kl_inputs()
    forbidden = torch.arange(7, 23)
    ref_bias = torch.zeros(23, dtype=torch.float64).index_fill(0, forbidden, -math.inf)
    bias = torch.full_like(ref_bias, shift).index_fill(0, forbidden, shift - 2000.0)
    biases = {"policy_bias": bias, "ref_bias": ref_bias}
    ours = linear_kl(hidden, weight, ref_hidden, ref_weight, direction=direction, **biases)
    truth = naive_kl(hidden, weight[:7], ref_hidden, ref_weight[:7], direction)
    assert agree(ours, truth, (hidden, weight), atol=1e-11)


def test_what_the_reference_forbids_costs_infinitely_much(any_tiles):
    given, bias = kl_inputs(), biases()["ref_bias"].detach().clone()
    bias[7:] = -math.inf
    assert (linear_kl(*given, ref_bias=bias) == math.inf).all()
    forward = {"ref_bias": bias, "direction": "forward"}
    assert close(linear_kl(*given, **forward), naive_kl(*given, **forward))
    assert (linear_kl(*given, policy_bias=bias, direction="forward") == math.inf).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", LOW)
def test_kl_in_low_precision_is_no_worse_than_naive(any_tiles, direction, dtype):
    def run(function, dtype_):
        mine = copies(kl_inputs(dtype, n=30), dtype_)
        value = function(*mine, direction=direction)
        return [value, *torch.autograd.grad(value.sum(), mine[:2])]

    for a, b, truth in zip(run(linear_kl, dtype), run(naive_kl, dtype), run(naive_kl, torch.float64), strict=True):
        error, allowed = (a - truth).abs(), (b - truth).abs()
        assert error.max() <= 2 * allowed.max() + 1e-6
        assert error.mean() <= 1.5 * allowed.mean() + 1e-6


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gradient_at_large_logits_is_no_worse_than_naive(any_tiles, direction):
    logits, step = torch.randn(2, 60, 80, generator=torch.Generator().manual_seed(5))
    policy, ref, eye = 12 * logits, 12 * logits + step, torch.eye(80)  # so that the products are exact

    def run(function, dtype):
        mine = copies((policy.requires_grad_(True), eye, ref, eye), dtype)
        return torch.autograd.grad(function(*mine, direction=direction).sum(), mine[0])[0].double()

    truth = run(naive_kl, torch.float64)
    ours, naive = ((run(f, torch.float32) - truth).norm(dim=1) / truth.norm(dim=1) for f in (linear_kl, naive_kl))
    # The derivative of js by autograd subtracts nothing that is nearly equal, and is exact to 3e-7.
    assert ours.median() <= (2 * naive.median() if direction != "js" else 5e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("step", [0.0, 1e-6, 1e-4, 1e-2])
def test_a_small_kl_is_never_negative_and_keeps_its_size(any_tiles, direction, step):
    hidden, weight, *_ = head(40, 6, 40, dtype=torch.float32)
    moved = weight.detach() + step * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    value = linear_kl(hidden, weight, hidden, moved, direction=direction)
    truth = naive_kl(*copies((hidden, weight, hidden, moved)), direction)
    assert (value >= 0).all()
    assert torch.allclose(value.double(), truth, rtol=1e-2, atol=1e-11)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kl_of_extreme_logits(any_tiles, direction):
    given = kl_inputs(torch.float32, scale=20.0)
    value = linear_kl(*given, direction=direction)
    truth = naive_kl(*copies(given), direction)
    assert torch.allclose(value.double(), truth, rtol=1e-4, atol=1e-4) and (value >= 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(value.sum(), given[:2]))


def test_kl_rows_without_gradient_are_skipped(any_tiles, rows_computed):
    hidden, weight, *_ = head()
    ref_hidden, ref_weight, *_ = head(seed=1)
    value = linear_kl(poisoned(hidden, 0), weight, ref_hidden, ref_weight)
    rows_computed.clear()
    factor = torch.zeros_like(value)
    factor[3] = 1
    (gradient,) = torch.autograd.grad(value, weight, factor)
    assert set(rows_computed) == {1} and gradient.isfinite().all() and (gradient != 0).any()


@pytest.mark.parametrize(("dtype", "again"), [(torch.float64, 0), (torch.float32, 2)])
def test_products_are_kept_where_both_weights_have_one_type(monkeypatch, rows_computed, dtype, again):
    """The room is the memory of the policy's weight gradient: those of a wider reference would be rounded in it."""
    monkeypatch.setattr(tiles, "KEEP_FROM", 0)
    hidden, weight, ref_hidden, ref_weight = kl_inputs(n=3)
    reference = ref_hidden.to(dtype), ref_weight.to(dtype)
    value = linear_kl(hidden, weight, *reference)
    rows_computed.clear()
    gradients = torch.autograd.grad(value.sum(), (hidden, weight))
    assert sum(rows_computed) == again * 3
    truth = torch.autograd.grad(naive_kl(hidden, weight, *copies(reference)).sum(), (hidden, weight))
    assert all(close(a, b, 1e-12 if dtype == torch.float64 else 1e-5) for a, b in zip(gradients, truth, strict=True))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_only_wanted_gradients_are_computed(monkeypatch, wanted):
    asked = []
    real = tiles.gradients

    def spy(products, needs, of_tile):
        asked.append(tuple(needs))
        found = real(products, needs, of_tile)
        assert [x is not None for x in found] == list(needs)
        return found

    monkeypatch.setattr(tiles, "gradients", spy)
    hidden, weight, *_ = head()
    hidden, weight = (x.detach().requires_grad_(w) for x, w in zip((hidden, weight), wanted, strict=True))
    ref_hidden, ref_weight, *_ = head(seed=1)
    linear_kl(hidden, weight, ref_hidden, ref_weight).sum().backward()
    assert asked == [(*wanted, False)]
    assert [x.grad is not None for x in (hidden, weight)] == list(wanted)
    assert ref_hidden.grad is None and ref_weight.grad is None
