"""Tiles of logits: they cover everything once, and what is added up over them is what the whole matrix gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.heads.held import Held
from tests.core.heads.naive import OPTIONS, close, coefficients, head, naive_logits, naive_logprobs

from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs
from klamp.core.heads.tiles import Head, Tile, find_columns, gradients, head_gradients


@given(rows=st.integers(0, 40), entries=st.integers(1, 60), tile_rows=st.integers(1, 9), tile_bytes=st.integers(1, 400))
def test_slices_cover_everything_once_and_stay_within_the_size_of_a_tile(
    rows: int, entries: int, tile_rows: int, tile_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", tile_rows)
        patch.setattr(tiles, "TILE_BYTES", tile_bytes)
        columns, chunks = tiles.tiles(torch.empty(rows, 2), torch.empty(entries, 2))
    for slices, total in ((columns, entries), (chunks, rows)):
        assert [i for s in slices for i in range(s.start, s.stop)] == list(range(total))
        lengths = [s.stop - s.start for s in slices]
        assert not lengths or max(lengths) - min(lengths) <= 1
    assert all(s.stop - s.start <= tile_rows for s in chunks)
    widest = max(s.stop - s.start for s in columns)
    assert 4 * widest * max(1, min(tile_rows, rows)) <= max(tile_bytes, 4 * max(1, min(tile_rows, rows)))


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 1.5}])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_logits_of_a_head_and_their_slope(options: dict, with_bias: bool) -> None:
    hidden, weight, bias, _ = head()
    given = Head(weight.detach(), bias.detach() if with_bias else None, **options)
    product = given.product(hidden.detach(), slice(3, 9), torch.empty(10, 6, dtype=torch.float64))
    raw = product.clone().requires_grad_(True)
    z, slope = given.logits(product)
    expected = naive_logits(hidden, weight, bias if with_bias else None, **options)[:, 3:9]
    assert close(z, expected.detach())
    cap = options.get("softcap")
    (wanted,) = torch.autograd.grad(
        ((raw if cap is None else cap * torch.tanh(raw / cap)) / options.get("temperature", 1.0)).sum(), raw
    )
    assert close(torch.ones_like(z) if slope is None else slope.expand_as(z), wanted)
    assert (slope is None) == (options == {})


def test_a_tile_is_one_piece_of_memory_in_float32_or_wider() -> None:
    tile = Tile(torch.empty(0, dtype=torch.bfloat16))
    large = tile.shaped(4, 5)
    assert large.dtype == torch.float32
    assert tile.shaped(3, 2).data_ptr() == large.data_ptr()
    assert tile.shaped(9, 9).shape == (9, 9)
    assert Tile(torch.empty(0, dtype=torch.float64)).shaped(1, 1).dtype == torch.float64


def test_a_target_is_found_in_its_own_tile_only() -> None:
    column, inside = find_columns(torch.tensor([0, 4, 5, 9, 10]), slice(5, 10))
    assert inside[:, 0].tolist() == [False, False, True, True, False]
    assert column[inside].tolist() == [0, 4]
    assert bool(((column >= 0) & (column < 5)).all()), "a gather must find a column for the others too"


@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_are_summed_over_the_tiles_and_only_where_needed(any_tiles: str, needs: tuple[bool, ...]) -> None:
    hidden, weight, _, _ = head()
    d = torch.randn(10, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = gradients(hidden.detach(), weight.detach(), needs, lambda rows, entries: d[rows, entries])
    for got, wanted, needed in zip(found, (d @ weight, d.t() @ hidden, d.sum(0)), needs, strict=True):
        assert (got is not None) == needed
        assert got is None or close(got, wanted.detach())


def test_the_weight_gradient_is_written_where_it_was_asked_to_be() -> None:
    hidden, weight, _, _ = head()
    room, d = torch.full_like(weight, math.nan), torch.ones(10, 23, dtype=torch.float64)
    place = (room, tiles.tiles(hidden, weight)[0])
    found = gradients(hidden.detach(), weight.detach(), (False, True, False), lambda r, e: d[r, e], place)
    assert found[1] is room
    assert close(room, (d.t() @ hidden).detach())


def test_rows_whose_gradient_is_zero_are_never_asked_for() -> None:
    hidden, weight, bias, _ = head()
    grad = coefficients(10)
    grad[[1, 4]] = 0
    asked: list[torch.Tensor] = []

    def make(index: torch.Tensor | slice, some: torch.Tensor) -> tiles.TileGradient:
        asked.append(torch.arange(10)[index])
        d = grad[index][:, None].expand(-1, 23)
        assert close(some, hidden[index])
        return lambda rows, entries: d[rows, entries].clone()

    found = head_gradients(grad, hidden.detach(), Head(weight.detach(), bias.detach()), (True, True, True), make)
    assert asked[0].tolist() == [0, 2, 3, 5, 6, 7, 8, 9]
    whole = grad[:, None].expand(-1, 23)
    assert all(
        close(a, b.detach()) for a, b in zip(found, (whole @ weight, whole.t() @ hidden, whole.sum(0)), strict=True)
    )


ROWS, ENTRIES = 512, 4000
MATRIX = 4 * ROWS * ENTRIES
"""Bytes of all logits in float32."""
SCORED = {
    "log-probabilities": linear_logprobs,
    "with the entropy": lambda *given: linear_logprobs(*given, return_entropy=True)[0],
    "KL": lambda hidden, weight, targets: linear_kl(hidden, weight, 2 * hidden.detach(), weight),
    "naive": naive_logprobs,
}


def held_by(name: str) -> Held:
    """What the way there and back takes, of so many rows and entries."""
    hidden, weight, _, targets = head(ROWS, 8, ENTRIES, dtype=torch.float32)
    with Held() as held:
        SCORED[name](hidden, weight, targets).sum().backward()
    return held


@pytest.mark.parametrize("name", [name for name in SCORED if name != "naive"])
def test_neither_on_the_way_there_nor_back_is_more_held_than_a_few_tiles(name: str, monkeypatch) -> None:
    """Counted; tests/core/heads/test_logprobs.py measures a process that does the same at the size of a model."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 2**16)
    monkeypatch.setattr(tiles, "TILE_ROWS", 64)
    held = held_by(name)
    assert held.largest <= MATRIX / 60, "a tile, or the gradient of the weight"
    assert held.most < MATRIX / 8


def test_the_count_sees_a_matrix_of_logits() -> None:
    held = held_by("naive")
    assert held.largest == MATRIX
    assert 3 * MATRIX <= held.most < 3.1 * MATRIX, "logits, their log-softmax, and the gradient of one"
