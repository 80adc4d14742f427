"""Tiles of logits: they cover everything once, and what is added up over them is what the whole matrix gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.heads.held import Held
from tests.core.heads.naive import head, naive_logprobs

from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs


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
    monkeypatch.setattr(tiles, "TILE_BYTES", 2**16)
    monkeypatch.setattr(tiles, "TILE_ROWS", 64)
    held = held_by(name)
    assert held.largest <= MATRIX / 60, "a tile, or the gradient of the weight"
    assert held.most < MATRIX / 8


def test_the_count_sees_a_matrix_of_logits() -> None:
    held = held_by("naive")
    assert held.largest == MATRIX
    assert 3 * MATRIX <= held.most < 3.1 * MATRIX, "logits, their log-softmax, and the gradient of one"
