"""Fixtures of the tests of the heads."""

import pytest

from klamp.core.heads import tiles


@pytest.fixture(params=["one tile", "many tiles", "many tiles, kept"])
def any_tiles(request, monkeypatch):
    """One tile for everything, and tiles of 3 rows and 5 entries, whose products are computed again or kept."""
    if request.param.startswith("many"):
        monkeypatch.setattr(tiles, "TILE_ROWS", 3)
        monkeypatch.setattr(tiles, "TILE_BYTES", 3 * 5 * 4)
    if request.param.endswith("kept"):
        monkeypatch.setattr(tiles, "KEEP_FROM", 0)
    return request.param


@pytest.fixture
def rows_computed(monkeypatch):
    seen, product = [], tiles.Head.product

    def counted(self, hidden, entries, out):
        seen.append(hidden.shape[0])
        return product(self, hidden, entries, out)

    monkeypatch.setattr(tiles.Head, "product", counted)
    return seen
