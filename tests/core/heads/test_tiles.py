"""Tiles of logits: products kept in the memory of the weight gradient, and how much is held at once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.core.heads.naive import agree, close, coefficients, head, kl_inputs, naive_kl, naive_logprobs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs
from klamp.errors import ShapeError

WIDTH = 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ROWS", 4)
    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 5 * 4)  # 23 entries in 5 tiles, of 4 and 5
    monkeypatch.setattr(tiles, "KEEP_FROM", 0)
    yield
    assert not tiles._waiting, "a dropped graph gives its room back"


@pytest.mark.parametrize("rows", [1, 3, 5, 6, 7, 13, 40])
def test_the_backward_pass_computes_only_what_found_no_room(rows, rows_computed):
    hidden, weight, bias, targets = head(rows, WIDTH)
    out = linear_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, softcap=3.0)
    count = len(tiles.tiles(hidden, weight)[0])
    assert sum(rows_computed) == count * rows
    rows_computed.clear()
    naive = naive_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, softcap=3.0)
    assert agree(out, naive, (hidden, weight, bias))
    assert sum(rows_computed) == count * max(0, rows - WIDTH)


@pytest.mark.parametrize("rows", [2, 3, 4, 7, 13])
@pytest.mark.parametrize("direction", ["reverse", "forward", "js"])
def test_the_kl_keeps_both_products_of_half_as_many_rows(rows, direction, rows_computed):
    given = kl_inputs(n=rows, h=WIDTH)
    out = linear_kl(*given, direction=direction)
    both = 2 * len(tiles.tiles(given[0], given[1])[0])
    rest = both * max(0, rows - WIDTH // 2)
    assert sum(rows_computed) == both * rows + (rest if direction == "js" else 0)
    rows_computed.clear()
    assert agree(out, naive_kl(*given, direction=direction), given[:2])
    assert sum(rows_computed) == rest


@pytest.mark.parametrize("live", [[0], [5], [0, 3, 5, 9], [6, 12], list(range(13))])
def test_rows_that_learn_find_their_own_products(live):
    # The rows that learn are packed together in the backward pass; what was kept for them is not.
    hidden, weight, _, targets = head(13, WIDTH)
    factor = torch.zeros(13, dtype=torch.float64).index_fill(0, torch.tensor(live), 1)
    given, reference = (hidden, weight), (hidden.detach() * 2, weight.detach())
    for ours, naive in (
        (linear_logprobs(*given, targets), naive_logprobs(*given, targets)),
        (linear_kl(*given, *reference), naive_kl(*given, *reference)),
    ):
        assert agree(factor * ours, factor * naive, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_is_lost_by_keeping(monkeypatch, dtype):
    hidden, weight, bias, targets = head(4, WIDTH, dtype=dtype, scale=2.0)

    def walk():
        out = linear_logprobs(hidden, weight, targets, bias=bias, softcap=3.0)
        return torch.autograd.grad(out @ coefficients(4, out.dtype), (hidden, weight, bias))

    kept = walk()
    monkeypatch.setattr(tiles, "KEEP_FROM", 10**9)
    assert all(torch.equal(a, b) for a, b in zip(kept, walk(), strict=True))


def test_one_call_of_a_weight_at_a_time_has_the_room(rows_computed):
    hidden, weight, _, targets = head(5, WIDTH)
    expected = torch.autograd.grad(naive_logprobs(hidden, weight, targets).sum(), (hidden, weight))
    first, second = (linear_logprobs(hidden, weight, targets).sum() for _ in range(2))
    divergence = linear_kl(hidden, weight.detach().requires_grad_(True), hidden, weight)  # the same memory
    assert len(tiles._waiting) == 1
    for out, computed in ((second, 25), (first, 0)):
        rows_computed.clear()
        gradients = torch.autograd.grad(out, (hidden, weight))
        assert sum(rows_computed) == computed and all(close(*pair) for pair in zip(gradients, expected, strict=True))
    assert not tiles._waiting
    third = linear_logprobs(hidden, weight, targets).sum()
    rows_computed.clear()
    third.backward()
    assert rows_computed == [] and close(weight.grad, expected[1])
    divergence.sum().backward()


@pytest.mark.parametrize("of_kl", [False, True])
def test_a_second_walk_computes_again_and_is_right(of_kl, rows_computed):
    hidden, weight, _, targets = head(9, WIDTH)
    given, ours, naive = (hidden, weight, targets), linear_logprobs, naive_logprobs
    if of_kl:
        given, ours, naive = kl_inputs(n=5, h=WIDTH), linear_kl, naive_kl
    expected = torch.autograd.grad(naive(*given).sum(), given[:2])
    out = ours(*given).sum()
    for computed in (20, 50, 50) if of_kl else (15, 45, 45):
        rows_computed.clear()
        gradients = torch.autograd.grad(out, given[:2], retain_graph=True)
        assert sum(rows_computed) == computed and all(close(*pair) for pair in zip(gradients, expected, strict=True))


def test_a_gradient_that_was_handed_out_is_left_alone():
    hidden, weight, _, targets = head(5, WIDTH)
    linear_logprobs(hidden, weight, targets).sum().backward()
    first = weight.grad.clone()
    out = linear_logprobs(hidden, weight, targets).sum()
    assert torch.equal(weight.grad, first)
    out.backward()
    assert close(weight.grad, 2 * first)


def test_a_weight_stored_the_other_way_round():
    hidden, weight, _, targets = head(9, WIDTH)
    turned = weight.detach().t().contiguous().t().requires_grad_(True)
    ours, naive = (f(hidden, turned, targets) for f in (linear_logprobs, naive_logprobs))
    assert agree(ours, naive, (hidden, turned))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_under_activation_checkpointing(reentrant, frozen):
    hidden, weight, _, targets = head(9, WIDTH)
    weight = weight.detach().requires_grad_(not frozen)
    ours = checkpoint(lambda x: linear_logprobs(torch.tanh(x), weight, targets), hidden, use_reentrant=reentrant)
    naive = naive_logprobs(torch.tanh(hidden), weight, targets)
    ours.sum().backward()
    learned = [hidden] if frozen else [hidden, weight]
    for mine, truth in zip(learned, torch.autograd.grad(naive.sum(), learned), strict=True):
        assert close(mine.grad, truth)


def test_under_autocast_the_weight_itself_is_what_waits(rows_computed):
    hidden, weight, _, targets = head(5, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (linear_logprobs(hidden, weight, targets).sum() for _ in range(2))
    assert len(tiles._waiting) == 1  # each call has a copy in bfloat16 of its own
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_no_room_is_taken_where_no_weight_gradient_will_be(monkeypatch):
    monkeypatch.setattr(tiles, "Buffer", None)  # calling it would fail
    hidden, weight, bias, targets = head(5, WIDTH)
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, targets).requires_grad
        assert not linear_kl(hidden, weight, hidden, weight).requires_grad
    assert linear_logprobs(hidden, weight.detach(), targets, bias=bias).requires_grad
    assert linear_kl(hidden, weight.detach(), hidden, weight).requires_grad
    with pytest.raises(TypeError, match="NoneType"):
        linear_logprobs(hidden, weight, targets)


class Held(TorchDispatchMode):
    """A context that counts the bytes of the tensors that its operations return: the largest, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for storage in storages(outputs).values():
            if storage._cdata not in storages((args, kwargs)):  # a view, or what was written into
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return outputs


def storages(tree: Any) -> dict[int, Any]:
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)}


ROWS, ENTRIES = 512, 4000
MATRIX = 4 * ROWS * ENTRIES
"""Bytes of all logits in float32."""
SCORED = {
    "log-probabilities": linear_logprobs,
    "with the entropy": lambda *given: linear_logprobs(*given, return_entropy=True)[0],
    "KL": lambda hidden, weight, targets: linear_kl(hidden, weight, 2 * hidden.detach(), weight),
    "KL of a head": lambda hidden, weight, targets: linear_kl(
        hidden, weight, 2 * hidden.detach(), weight, top_k=8, targets=targets
    ),
    "KL of a head, frozen": lambda hidden, weight, targets: linear_kl(
        hidden, weight.detach(), 2 * hidden.detach(), weight, top_k=8, targets=targets
    ),
}


@pytest.mark.parametrize("name", SCORED)
def test_neither_on_the_way_there_nor_back_is_more_held_than_a_few_tiles(name: str, monkeypatch) -> None:
    for setting, value in {"TILE_BYTES": 2**16, "TILE_ROWS": 64, "KEEP_FROM": 2**20}.items():
        monkeypatch.setattr(tiles, setting, value)
    hidden, weight, _, targets = head(ROWS, 8, ENTRIES, dtype=torch.float32)
    with Held() as held:
        SCORED[name](hidden, weight, targets).sum().backward()
    assert held.largest <= MATRIX / 60, "a tile, or the gradient of the weight"
    assert held.most < MATRIX / 8


def test_a_head_without_words_is_refused() -> None:
    with pytest.raises(ShapeError, match="do not fit together"):
        linear_logprobs(torch.ones(2, 4), torch.zeros(0, 4), torch.zeros(2, dtype=torch.long))
