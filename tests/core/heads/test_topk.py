"""Several tokens per row, the k likeliest, and the KL over a head of them, from hidden states: as with all logits."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.heads.naive import DIRECTIONS, OPTIONS, head, kl_inputs, naive_logits, poisoned

from klamp.core.estimators import exact_kl
from klamp.core.heads import tiles
from klamp.core.heads.kl import cut_mass, linear_head_kl, linear_kl
from klamp.core.heads.logprobs import linear_logprobs, linear_topk
from klamp.core.heads.tiles import Head
from klamp.core.topk import topk_kl
from klamp.errors import ShapeError

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.bfloat16: 0.25}
LEARNS = ((True, True), (True, False), (False, True))


def several(n, k, v):
    ids = torch.randint(v, (n, k), generator=torch.Generator().manual_seed(3))
    if k > 2:
        ids[:, 2] = ids[:, 0]
    return ids


def gradients(value, inputs):
    factor = torch.randn(value.shape, generator=torch.Generator().manual_seed(7)).to(value.dtype)
    learning = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad((value * factor).sum(), learning, retain_graph=True)


def same(found, wanted, inputs, dense):
    """Value and gradients are those of the dense computation, whose inputs are in float64."""
    tolerance = TOLERANCE[inputs[0].dtype]
    assert torch.allclose(found.double(), wanted, rtol=tolerance, atol=tolerance)
    for mine, truth in zip(gradients(found, inputs), gradients(wanted, dense), strict=True):
        assert torch.allclose(mine.double(), truth, rtol=tolerance, atol=tolerance * max(1, truth.abs().max()))


@given(
    n=st.integers(1, 8), k=st.integers(0, 5), v=st.integers(1, 40), learns=st.sampled_from(LEARNS), bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)), options=st.sampled_from(OPTIONS), top=st.integers(0, 45),
)  # fmt: skip
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_log_probabilities_of_several_and_of_the_likeliest(any_tiles, n, k, v, learns, bias, dtype, options, top):
    hidden, weight, b, targets = head(n, 6, v, dtype=dtype)
    inputs = [hidden.requires_grad_(learns[0]), weight.requires_grad_(learns[1]), *([b] if bias else [])]
    dense = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    logprobs = naive_logits(*dense, **options).log_softmax(-1)
    options = options | ({"bias": b} if bias else {})
    ids = several(n, k, v)
    same(linear_logprobs(hidden, weight, ids, **options), logprobs.gather(1, ids), inputs, dense)
    found = linear_topk(hidden, weight, top, targets=targets, **options)
    together = torch.cat((found.logprobs, found.target_logprobs[:, None]), 1)
    same(together, logprobs.gather(1, torch.cat((found.ids, targets[:, None]), 1)), inputs, dense)
    best = logprobs.topk(min(top, v), 1).values
    assert torch.allclose(found.logprobs.double(), best, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert all(len(set(row)) == min(top, v) for row in found.ids.tolist())


def test_the_likeliest_of_many_tiles_with_blocks_that_are_skipped(monkeypatch):
    """Tiles of 3 rows and 40 entries: two blocks of 16 whose largest may be below a row's k, and 8 entries beside."""
    monkeypatch.setattr(tiles, "TILE_ROWS", 3)
    monkeypatch.setattr(tiles, "TILE_BYTES", 3 * 40 * 4)
    hidden, weight, *_ = head(7, 6, 400)
    best = naive_logits(hidden, weight).log_softmax(-1).topk(5, 1)
    top = linear_topk(hidden, weight, 5)
    assert torch.equal(top.ids, best.indices) and torch.allclose(top.logprobs, best.values)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("learns", LEARNS)
def test_one_target_is_the_same_as_a_row_of_one(any_tiles, learns, options):
    hidden, weight, _, targets = head(dtype=torch.float32)
    inputs = hidden.requires_grad_(learns[0]), weight.requires_grad_(learns[1])
    one = linear_logprobs(*inputs, targets, **options)
    slopes = gradients(one, inputs)
    row = linear_logprobs(*inputs, targets[:, None], **options)
    assert torch.equal(one, row[:, 0])
    assert all(torch.equal(*pair) for pair in zip(slopes, gradients(row[:, 0], inputs), strict=True))
    assert torch.equal(linear_topk(*inputs, 3, targets=targets, **options).target_logprobs, one)


def dense_topk(p, q, ids, targets, **options):
    outside = (ids != targets[:, None]).all(1)
    at = targets[:, None]
    return topk_kl(p.gather(1, ids), q.gather(1, ids), p.gather(1, at)[:, 0], q.gather(1, at)[:, 0], outside, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("options", "learns"), list(zip(OPTIONS, itertools.cycle((True, False)))))
def test_the_kl_over_a_head_as_with_all_logits(any_tiles, direction, options, learns):
    hidden, weight, ref_hidden, ref_weight = kl_inputs()
    weight.requires_grad_(learns)
    targets, log_w = head()[3], head()[0].detach()[:, 0]
    q = naive_logits(ref_hidden, ref_weight, **options).log_softmax(-1)
    for k, tail in ((0, "sampled"), (4, "sampled"), (4, "bucket"), (4, "none"), (30, "sampled")):
        p = naive_logits(hidden, weight, **options).log_softmax(-1)
        ids = p.topk(min(k, 23), 1).indices
        more = {"direction": direction, "tail": tail, "log_weight": log_w}
        wanted = dense_topk(p, q, ids, targets, **more)
        found = linear_kl(hidden, weight, ref_hidden, ref_weight, top_k=k, targets=targets, **more, **options)
        same(found, wanted, (hidden, weight), (hidden, weight))
        anchor = {"targets": targets, "target_logprobs": q.gather(1, targets[:, None])[:, 0]}
        came = torch.cat((ids, targets[:, None]), 1)  # as a server sends it, the sampled token beside its k
        served = linear_head_kl(hidden, weight, came, q.gather(1, came), top_k=k, **anchor, **more, **options)
        same(served, wanted, (hidden, weight), (hidden, weight))
    whole = naive_logits(hidden, weight, **options), naive_logits(ref_hidden, ref_weight, **options)
    same(found, exact_kl(*whole, direction=direction), (hidden, weight), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_where_policy_and_reference_are_the_same_every_gradient_is_exactly_zero(any_tiles, direction, dtype):
    hidden, weight, _, targets = head(dtype=dtype)
    args = hidden, weight, hidden.detach(), weight.detach()  # tied to the reference, too
    found = linear_kl(*args, top_k=4, targets=targets, direction=direction)
    assert (found.abs() < 1e-12).all()
    assert all((x == 0).all() for x in gradients(found, (hidden, weight)))


def test_neither_rows_nor_a_bad_row_that_counts_for_nothing():
    hidden, weight, ref_hidden, ref_weight = kl_inputs()
    targets = head()[3]
    empty = linear_kl(hidden[:0], weight, ref_hidden[:0], ref_weight, top_k=3, targets=targets[:0])
    assert empty.shape == (0,) and all((x == 0).all() for x in gradients(empty, (hidden, weight)))
    bad = poisoned(hidden, 2)
    for learns in (True, False):
        weight.requires_grad_(learns)
        value = linear_kl(bad, weight, ref_hidden, ref_weight, top_k=3, targets=targets)
        found = torch.autograd.grad(value[3:].sum(), [bad, weight][: 1 + learns])
        assert all(x.isfinite().all() for x in found) and (found[0][2] == 0).all()


PADDED = (0.8, 0.1, -0.5, 0.3, -1.0), (0.2, 0.6, -0.1, -0.4, 0.1, -6.0, -6.5)
PADDED_GRADIENT = (0.160945587, -0.135053294, -0.063393218, 0.121488696, -0.083987771)


def test_a_reference_with_padding_and_a_policy_with_padding(any_tiles):
    policy, ref = (torch.tensor(x, dtype=torch.float64)[:, None] for x in PADDED)  # as weights of one hidden number
    one = torch.ones(1, 1, dtype=torch.float64)
    policy.requires_grad_(True)
    cut = cut_mass(one, Head(ref), 5)
    assert cut.item() == pytest.approx(0.000695235, abs=1e-9)
    value = linear_kl(one, policy, one, ref)
    assert value.item() == pytest.approx(0.203150791 - math.log1p(-cut) - cut.item(), abs=1e-9)
    assert torch.autograd.grad(value, policy)[0][:, 0].tolist() == pytest.approx(PADDED_GRADIENT, abs=1e-9)
    for direction in DIRECTIONS:
        args = {"direction": direction, "top_k": 5, "targets": torch.tensor([0])}
        pair = [linear_kl(one, policy, one, ref, **x) for x in (args, {"direction": direction})]
        same(*pair, [policy], [policy])
    with pytest.raises(ShapeError, match="lacks a token"):
        linear_kl(one, ref, one, policy.detach())
