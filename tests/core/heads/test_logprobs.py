"""Heads without logits: equal to the naive ones in value and gradient, at any tile size, in bounded memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.heads.naive import OPTIONS, close, coefficients, head, naive_logprobs
from torch.nn.functional import linear

from klamp.core.estimators import exact_kl
from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs

# --- linear_logprobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_the_naive_ones(any_tiles, options, with_bias, frozen):
    hidden, weight, bias, targets = head()
    weight, bias = (x.detach().requires_grad_(not frozen) for x in (weight, bias))
    learned = [hidden] if frozen else [hidden, weight, *([bias] if with_bias else [])]
    options = {**options, "bias": bias if with_bias else None}
    ours, naive = (
        linear_logprobs(hidden, weight, targets, **options),
        naive_logprobs(hidden, weight, targets, **options),
    )
    assert ours.dtype == torch.float64 and close(ours, naive)
    for a, b in zip(*(torch.autograd.grad(x @ coefficients(10), learned) for x in (ours, naive)), strict=True):
        assert close(a, b)


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


def test_no_rows():
    hidden, weight, bias, targets = head(0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=bias, return_entropy=True)
    kl = linear_kl(hidden, weight, hidden.detach(), weight.detach())
    assert logprobs.shape == entropy.shape == kl.shape == (0,)
    for gradient in torch.autograd.grad(logprobs.sum() + kl.sum(), (hidden, weight, bias)):
        assert (gradient == 0).all()


def test_under_autocast_it_computes_what_a_linear_layer_would():
    hidden, weight, _, targets = head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_logprobs(hidden, weight, targets)
        kl = linear_kl(hidden, weight, hidden.detach(), weight.detach())
        naive = linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(ours, naive, atol=1e-5) and (kl == 0).all()
    gradients = [torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, naive)]
    assert all(a.dtype == torch.float32 and torch.allclose(a, b, atol=0.1) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
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
