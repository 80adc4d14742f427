"""The passes of `linear_logprobs` over tiles: entropy, gradients formed on the way, low precision, work left out."""

import math

import pytest
import torch
from tests.core.heads.naive import (
    LOW,
    OPTIONS,
    agree,
    close,
    coefficients,
    copies,
    head,
    naive_logits,
    naive_logprobs,
    poisoned,
)

from klamp.core.heads import tiles
from klamp.core.heads.logprobs import linear_logprobs


@pytest.mark.parametrize("order", [1, -1])
def test_the_gradient_formed_on_the_way_survives_a_rising_peak(monkeypatch, order):
    """The largest logit grows by 30 from tile to tile, or falls: the sum so far is scaled to the new peak."""
    monkeypatch.setattr(tiles, "TILE_ROWS", 2)
    monkeypatch.setattr(tiles, "TILE_BYTES", 2 * 2 * 4)
    weight = (torch.arange(8, dtype=torch.float64) * 30 * order)[:, None] * torch.ones(1, 3, dtype=torch.float64) / 3
    hidden = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6])
    ours, naive = (f(hidden, weight, targets).sum() for f in (linear_logprobs, naive_logprobs))
    assert close(*(torch.autograd.grad(x, hidden)[0] for x in (ours, naive)))


@pytest.mark.parametrize("options", OPTIONS)
def test_entropy_is_that_of_the_softmax_and_detached(any_tiles, options):
    hidden, weight, _, targets = head(scale=2.0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True, **options)
    log_p = naive_logits(hidden, weight, **options).log_softmax(-1)
    assert close(entropy, -(log_p.exp() * log_p).sum(-1).detach())
    assert logprobs.requires_grad and not entropy.requires_grad
    assert close(logprobs, linear_logprobs(hidden, weight, targets, **options))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_low_precision_is_no_worse_than_the_naive_head(any_tiles, dtype, frozen, scale):
    hidden, weight, bias, targets = head(20, 16, 50, dtype=dtype, scale=scale)
    weight, bias = (x.detach().requires_grad_(not frozen) for x in (weight, bias))

    def run(function, dtype):
        mine = copies((hidden, weight, bias), dtype)
        value = function(mine[0], mine[1], targets, bias=mine[2])
        learned = mine[:1] if frozen else mine
        return [value, *torch.autograd.grad(value @ coefficients(20, value.dtype), learned)]

    ours, naive, truth = run(linear_logprobs, dtype), run(naive_logprobs, dtype), run(naive_logprobs, torch.float64)
    assert ours[0].dtype == torch.float32 and all(x.dtype == dtype for x in ours[1:])
    for a, b, exact in zip(ours, naive, truth, strict=True):
        error, allowed = (a - exact).abs(), (b - exact).abs()
        assert error.max() <= 2 * allowed.max() + 1e-6
        assert error.mean() <= 1.5 * allowed.mean() + 1e-6


def test_many_tiles_lose_nothing_in_bfloat16(monkeypatch):
    # Summed in bfloat16, 200 tiles of rows would lose most of the weight gradient.
    monkeypatch.setattr(tiles, "TILE_ROWS", 4)
    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 8 * 4)
    hidden, weight, _, targets = head(800, 8, 32, dtype=torch.bfloat16)
    (ours,) = torch.autograd.grad(linear_logprobs(hidden, weight, targets).sum(), weight)
    exact_hidden, exact_weight = copies((hidden, weight))
    (truth,) = torch.autograd.grad(naive_logprobs(exact_hidden, exact_weight, targets).sum(), exact_weight)
    (plain,) = torch.autograd.grad(naive_logprobs(hidden, weight, targets).sum(), weight)
    assert (ours - truth).abs().mean() <= 1.1 * (plain - truth).abs().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_without_gradient_are_skipped_and_reach_nothing(any_tiles, rows_computed, frozen):
    hidden, weight, bias, targets = head()
    weight, bias = (x.detach().requires_grad_(not frozen) for x in (weight, bias))
    hidden, factor = poisoned(hidden, 2), coefficients(10)
    factor[[2, 5]] = 0
    kept = [0, 1, 3, 4, 6, 7, 8, 9]
    ours = linear_logprobs(hidden, weight, targets, bias=bias)
    before = len(rows_computed)
    wanted = [hidden] if frozen else [hidden, weight, bias]
    found = torch.autograd.grad(ours, wanted, factor)
    spent = sum(rows_computed[before:])
    # Of the 8 rows that learn, 4 are among the 6 whose products are kept.
    assert spent % (4 if any_tiles.endswith("kept") else 8) == 0 and (spent == 0) is frozen
    clean = naive_logprobs(hidden[kept], weight, targets[kept], bias=bias)
    for a, b in zip(found, torch.autograd.grad(clean, wanted, factor[kept]), strict=True):
        assert close(a, torch.where(torch.isnan(b), 0, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frozen", [False, True])
def test_extreme_logits_are_finite_and_right(any_tiles, dtype, frozen):
    hidden, weight, _, targets = head(dtype=dtype, scale=60.0)
    weight = weight.detach().requires_grad_(not frozen)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True)
    truth = naive_logprobs(*copies((hidden, weight)), targets)
    assert truth.min() < -1e3
    assert torch.allclose(logprobs.double(), truth, rtol=1e-5, atol=1e-3)
    assert (logprobs <= 0).all() and (entropy >= 0).all() and entropy.isfinite().all()
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_entries_that_the_bias_forbids_have_no_part(any_tiles):
    hidden, weight, bias, targets = head()
    shut = bias.detach().clone()
    shut[5:] = -math.inf
    targets = targets % 5
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=shut, return_entropy=True)
    truth = naive_logprobs(hidden, weight[:5], targets, bias=shut[:5])
    assert entropy.isfinite().all() and agree(logprobs, truth, weight)


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_a_vocabulary_of_one_entry_has_no_gradient_however_large_its_logit(size):
    """The backward pass computes the products of some rows again, rounded otherwise: their p must not show it."""
    hidden, weight, _, _ = head(n=64, h=32, v=1, dtype=torch.float32, scale=size)
    found = linear_logprobs(hidden, weight, torch.zeros(64, dtype=torch.long))
    found.backward((torch.arange(64) % 3 > 0).float())
    assert all((x == 0).all() for x in (found, hidden.grad, weight.grad))
