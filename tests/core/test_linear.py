"""Heads without logits: equal to the naive ones in value and gradient, at any tile size, in bounded memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from klamp.core import tiles
from klamp.core.estimators import exact_kl
from klamp.core.linear import linear_kl, linear_logprobs
from klamp.errors import ConfigError, ShapeError, UnknownNameError

DIRECTIONS = ("reverse", "forward", "js")
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"softcap": 3.0},
    {"softcap": 2.0, "temperature": 1.3},
]
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["one tile", "many tiles"])
def any_tiles(request, monkeypatch):
    """Once with everything in one tile, once with 3 rows and 5 entries per tile."""
    if request.param == "many tiles":
        monkeypatch.setattr(tiles, "TILE_ROWS", 3)
        monkeypatch.setattr(tiles, "TILE_BYTES", 3 * 5 * 4)


def head(n=10, h=6, v=23, *, dtype=torch.float64, seed=0, scale=1.0):
    """Hidden states, weight, bias and targets."""
    random = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(dtype).requires_grad_(True)
        for shape in ((n, h), (v, h), (v,))
    )
    return hidden, weight, bias, torch.randint(v, (n,), generator=random)


def coefficients(n, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def naive_logits(hidden, weight, bias=None, temperature=1.0, softcap=None):
    raw = linear(hidden, weight, bias)
    raw = raw if raw.dtype == torch.float64 else raw.float()
    return (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / temperature


def naive_logprobs(hidden, weight, targets, **options):
    return naive_logits(hidden, weight, **options).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def close(a, b, atol=1e-12):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)


def copies(tensors, dtype=torch.float64):
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in tensors]


# --- linear_logprobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_the_naive_ones(any_tiles, options, with_bias):
    hidden, weight, bias, targets = head()
    learned = [hidden, weight, *([bias] if with_bias else [])]
    options = {**options, "bias": bias if with_bias else None}
    ours, naive = (
        linear_logprobs(hidden, weight, targets, **options),
        naive_logprobs(hidden, weight, targets, **options),
    )
    assert ours.dtype == torch.float64 and close(ours, naive)
    for a, b in zip(*(torch.autograd.grad(x @ coefficients(10), learned) for x in (ours, naive)), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_frozen_head_gives_the_same_gradient_of_hidden(any_tiles, options, with_bias):
    hidden, weight, bias, targets = head()
    weight, options = weight.detach(), {**options, "bias": bias.detach() if with_bias else None}
    ours, naive = (
        linear_logprobs(hidden, weight, targets, **options),
        naive_logprobs(hidden, weight, targets, **options),
    )
    assert close(ours, naive)
    gradients = [torch.autograd.grad(x @ coefficients(10), hidden)[0] for x in (ours, naive)]
    assert close(*gradients)


def test_gradcheck(any_tiles):
    hidden, weight, bias, targets = head(4, 3, 11)

    def scored(hidden, weight, bias):
        return linear_logprobs(hidden, weight, targets, bias=bias, temperature=0.8, softcap=4.0)

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda x: scored(x, weight.detach(), bias.detach()), (hidden,))


@pytest.mark.parametrize("options", OPTIONS)
def test_entropy_is_that_of_the_softmax_and_detached(any_tiles, options):
    hidden, weight, _, targets = head(scale=2.0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True, **options)
    log_p = naive_logits(hidden, weight, **options).log_softmax(-1)
    assert close(entropy, -(log_p.exp() * log_p).sum(-1).detach())
    assert logprobs.requires_grad and not entropy.requires_grad
    assert close(logprobs, linear_logprobs(hidden, weight, targets, **options))


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 17), st.integers(1, 5), st.integers(4, 200))
@settings(deadline=None, max_examples=40)
def test_any_sizes(n, h, v, tile_rows, tile_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", tile_rows)
        patch.setattr(tiles, "TILE_BYTES", tile_bytes)
        hidden, weight, bias, targets = head(n, h, v)
        ours, naive = (f(hidden, weight, targets, bias=bias) for f in (linear_logprobs, naive_logprobs))
        gradients = [torch.autograd.grad(x @ coefficients(n), (hidden, weight, bias)) for x in (ours, naive)]
        assert close(ours, naive) and all(close(a, b) for a, b in zip(*gradients, strict=True))
        ref_hidden, ref_weight, *_ = head(n, h + 1, v, seed=1)
        kl = linear_kl(hidden, weight, ref_hidden, ref_weight)
        assert close(kl, exact_kl(hidden @ weight.t(), ref_hidden @ ref_weight.t()))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_low_precision_is_no_worse_than_the_naive_head(any_tiles, dtype, frozen, scale):
    hidden, weight, bias, targets = head(20, 16, 50, dtype=dtype, scale=scale)
    learned = [hidden] if frozen else [hidden, weight, bias]
    if frozen:
        weight, bias = weight.detach(), bias.detach()

    def run(function, dtype):
        mine = copies((hidden, weight, bias), dtype)
        value = function(mine[0], mine[1], targets, bias=mine[2])
        grads = torch.autograd.grad(value @ coefficients(20, value.dtype), mine[: len(learned)])
        return [value, *grads]

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


# --- work that is not wanted is not done ------------------------------------------------------------------


@pytest.fixture
def rows_computed(monkeypatch):
    """Number of rows that each tile of logits was computed for."""
    seen, logits = [], tiles.Head.logits

    def counted(self, hidden, entries):
        seen.append(hidden.shape[0])
        return logits(self, hidden, entries)

    monkeypatch.setattr(tiles.Head, "logits", counted)
    return seen


def poisoned(hidden, row):
    hidden = hidden.detach().clone()
    hidden[row] = math.nan
    return hidden.requires_grad_(True)


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
    assert spent % 8 == 0 and (spent == 0) is frozen
    clean = naive_logprobs(hidden[kept], weight, targets[kept], bias=bias)
    for a, b in zip(found, torch.autograd.grad(clean, wanted, factor[kept]), strict=True):
        assert close(a, torch.where(torch.isnan(b), 0, b))


def test_no_gradient_at_all_costs_no_product(rows_computed):
    hidden, weight, bias, targets = head()
    out = linear_logprobs(hidden, weight, targets, bias=bias)
    rows_computed.clear()
    for gradient in torch.autograd.grad(out, (hidden, weight, bias), torch.zeros_like(out)):
        assert (gradient == 0).all()
    assert rows_computed == []


def test_kl_rows_without_gradient_are_skipped(any_tiles, rows_computed):
    hidden, weight, *_ = head()
    ref_hidden, ref_weight, *_ = head(seed=1)
    value = linear_kl(poisoned(hidden, 0), weight, ref_hidden, ref_weight)
    rows_computed.clear()
    factor = torch.zeros_like(value)
    factor[3] = 1
    (gradient,) = torch.autograd.grad(value, weight, factor)
    assert set(rows_computed) == {1} and gradient.isfinite().all() and (gradient != 0).any()


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_only_wanted_gradients_are_computed(monkeypatch, wanted):
    asked = []
    real = tiles.gradients

    def spy(hidden, head, needs, of_logits):
        asked.append(tuple(needs))
        found = real(hidden, head, needs, of_logits)
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


def test_a_tied_weight_adds_both_gradients():
    _, weight, _, targets = head()
    hidden = torch.tanh(weight[targets])
    ours, naive = (f(hidden, weight, targets).sum() for f in (linear_logprobs, naive_logprobs))
    assert close(*(torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (ours, naive)))


def test_without_grad_nothing_is_kept(any_tiles):
    hidden, weight, _, targets = head()
    expected = linear_logprobs(hidden, weight, targets)
    with torch.no_grad():
        ours = linear_logprobs(hidden, weight, targets)
        kl = linear_kl(hidden, weight, hidden, weight)
    assert not ours.requires_grad and not kl.requires_grad
    assert torch.equal(ours, expected) and (kl == 0).all()


def test_the_graph_can_be_walked_twice():
    hidden, weight, _, targets = head()
    out = linear_logprobs(hidden, weight, targets).sum()
    first = torch.autograd.grad(out, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, (hidden, weight)), strict=True))


# --- extremes ---------------------------------------------------------------------------------------------


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
    assert close(logprobs, truth) and entropy.isfinite().all()
    assert close(*(torch.autograd.grad(x.sum(), weight, retain_graph=True)[0] for x in (logprobs, truth)))


def test_no_rows():
    hidden, weight, bias, targets = head(0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=bias, return_entropy=True)
    kl = linear_kl(hidden, weight, hidden.detach(), weight.detach())
    assert logprobs.shape == entropy.shape == kl.shape == (0,)
    for gradient in torch.autograd.grad(logprobs.sum() + kl.sum(), (hidden, weight, bias)):
        assert (gradient == 0).all()


# --- linear_kl --------------------------------------------------------------------------------------------


def kl_inputs(dtype=torch.float64, *, n=10, v=23, scale=1.0):
    hidden, weight, *_ = head(n, 6, v, dtype=dtype, scale=scale)
    ref_hidden, ref_weight, *_ = head(n, 4, v, dtype=dtype, seed=1, scale=scale)
    return hidden, weight, ref_hidden.detach(), ref_weight.detach()


def naive_kl(hidden, weight, ref_hidden, ref_weight, direction="reverse"):
    return exact_kl(hidden @ weight.t(), ref_hidden @ ref_weight.t(), direction=direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kl_is_exact_kl_in_value_and_gradient(any_tiles, direction):
    given = kl_inputs()
    ours, naive = (f(*given, direction=direction) for f in (linear_kl, naive_kl))
    assert close(ours, naive)
    for a, b in zip(*(torch.autograd.grad(x @ coefficients(10), given[:2]) for x in (ours, naive)), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kl_gradcheck(any_tiles, direction):
    hidden, weight, *ref = kl_inputs(n=4, v=11)
    assert torch.autograd.gradcheck(lambda a, b: linear_kl(a, b, *ref, direction=direction), (hidden, weight))


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
@pytest.mark.parametrize("step", [0.0, 1e-6, 1e-4, 1e-2])
def test_a_small_kl_is_never_negative_and_keeps_its_size(any_tiles, direction, step):
    hidden, weight, *_ = head(200, 6, 40, dtype=torch.float32)
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


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, ShapeError, "do not fit together"),
        ({"weight": torch.zeros(7)}, ShapeError, "do not fit together"),
        ({"bias": torch.zeros(6)}, ShapeError, "do not fit together"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, ShapeError, "targets do not fit"),
        ({"targets": torch.zeros(3)}, ShapeError, "targets do not fit"),
        ({"targets": torch.tensor([0, 7, 1])}, ConfigError, "outside the vocabulary"),
        ({"targets": torch.tensor([0, -100, 1])}, ConfigError, "-100"),
        ({"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, ConfigError, "differ in type"),
        ({"temperature": 0.0}, ConfigError, "temperature must be positive"),
        ({"temperature": math.nan}, ConfigError, "temperature must be positive"),
        ({"softcap": -1.0}, ConfigError, "softcap must be positive"),
    ],
)
def test_what_cannot_work_is_refused(shapes_unchecked, change, error, message):
    good = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "targets": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(error, match=message) as caught:
        linear_logprobs(**(good | change))
    assert caught.value.got is not None and caught.value.why and caught.value.fix


def test_a_kl_that_cannot_work_is_refused(shapes_unchecked):
    x = torch.zeros(3, 4)
    for bad, message in (
        ((x, x, torch.zeros(2, 4), x), "differ in rows or vocabulary"),
        ((x, torch.zeros(5, 4), x, x), "differ in rows or vocabulary"),
        ((x, x, x, torch.zeros(3, 5)), "the reference's hidden states"),
    ):
        with pytest.raises(ShapeError, match=message):
            linear_kl(*bad)
    with pytest.raises(UnknownNameError, match="reverse"):
        linear_kl(x, x, x, x, direction="revers")


# --- in company -------------------------------------------------------------------------------------------


def test_under_autocast_it_computes_what_a_linear_layer_would():
    hidden, weight, _, targets = head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_logprobs(hidden, weight, targets)
        kl = linear_kl(hidden, weight, hidden.detach(), weight.detach())
        naive = linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(ours, naive, atol=1e-5) and (kl == 0).all()
    gradients = [torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, naive)]
    assert all(a.dtype == torch.float32 and torch.allclose(a, b, atol=0.1) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_torch_compile(shapes_unchecked, backend):
    hidden, weight, _, targets = head()
    factor = coefficients(10)
    factor[4] = 0

    def loss(hidden, weight):
        hidden = torch.tanh(hidden)
        logprobs, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True)
        return (factor * (logprobs + linear_kl(hidden, weight, hidden * 2, weight))).sum() + entropy.mean()

    compiled, plain = torch.compile(loss, backend=backend)(hidden, weight), loss(hidden, weight)
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in (compiled, plain)]
    assert close(compiled, plain) and all(close(a, b) for a, b in zip(*gradients, strict=True))
    torch.compiler.reset()


MEASURE = """
import resource, sys, torch
from klamp.core.linear import linear_kl, linear_logprobs
torch.set_num_threads(1)
n, h, v = 2048, 16, 50_000
hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
def run(n):
    x = hidden[:n]
    scores = linear_logprobs(x, weight, torch.arange(n)) if sys.argv[1] == "logprobs" else None
    y = linear_kl(x, weight, x * 2, weight) if scores is None else scores
    y.sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
run(8)
before = peak()
run(n)
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["logprobs", "kl"])
def test_peak_memory_stays_far_below_the_matrix_of_logits(name):
    done = subprocess.run([sys.executable, "-c", MEASURE, name], capture_output=True, text=True, check=True)
    matrix = 2048 * 50_000 * 4  # 391 MiB; the naive head needs it two or three times
    assert int(done.stdout) < matrix / 2
