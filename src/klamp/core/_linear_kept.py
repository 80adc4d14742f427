"""Products of the forward pass, kept for the backward pass in the memory that it will need for the weight gradient.

That gradient, [V, H], has to be allocated anyway. Allocated in the forward pass already, the slice of it that belongs
to c vocabulary entries has room for the products of H rows with these entries (H / 2 rows of two heads). The backward
pass reads them tile by tile, and writes a slice of the gradient over them once its last tile has been read. Kept is
the product as the head rounded it, in its own type, so that nothing is lost.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from klamp.core.tiles import Head, Place, Tile, tiles

KEEP_FROM = 2**20
"""Fewest entries of a weight for which this pays; below, every walk through a graph is equal to the last bit."""

Owner = tuple[torch.device, int]


class Kept:
    """Room for the products of the first rows of a call, in the shape of its weight gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, heads: int) -> None:
        self.d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.columns = tiles(hidden, weight)[0]  # those of the forward pass, however few rows learn
        self.rows = min(hidden.shape[0], weight.shape[1] // heads)

    @property
    def place(self) -> Place:
        """The weight gradient and the slices of the vocabulary that it is to be written in."""
        return self.d_weight, self.columns

    def room(self, entries: slice, head: int) -> Tensor:
        """[rows, entries] of one of the heads; holds what was copied there."""
        size = self.rows * (entries.stop - entries.start)
        return self.d_weight[entries].view(-1)[head * size : (head + 1) * size].view(self.rows, -1)


# Each call between its forward and its backward pass, by its weight. Nothing here keeps it alive but its graph.
_waiting: WeakValueDictionary[Owner, Kept] = WeakValueDictionary()


def owner_of(weight: Tensor) -> Owner:
    """What tells weights apart, through casts and detached copies of the same memory."""
    return weight.device, weight.data_ptr()


def keep(owner: Owner, hidden: Tensor, weight: Tensor, *, heads: int = 1) -> Kept | None:
    """Room for a call; None where it would not pay, or where another call of this weight waits for its backward pass.

    Two waiting calls with room each would be two [V, H] at a time, where the backward passes need one after the other.
    """
    if hidden.shape[0] == 0 or weight.numel() < KEEP_FROM or weight.shape[1] < heads or owner in _waiting:
        return None
    _waiting[owner] = kept = Kept(hidden, weight, heads)
    return kept


class Products:
    """The products of one head with the hidden states of a call, tile by tile, each in the memory of the last."""

    def __init__(self, head: Head, hidden: Tensor, kept: Kept | None, *, which: int = 0) -> None:
        self.head, self.hidden, self.kept, self.which = head, hidden, kept, which
        self.order: Tensor | None = None
        self.known = 0 if kept is None else kept.rows
        self.tile = Tile(hidden)

    def of(self, index: Tensor | slice, hidden: Tensor) -> Products:
        """The same of some of the rows, in the same order: the backward pass takes only those that learn."""
        some = Products(self.head, hidden, self.kept, which=self.which)
        if isinstance(index, Tensor):
            some.order = index[index < self.known]
            some.known = some.order.numel()
        return some

    def form(self, rows: slice, entries: slice) -> Tensor:
        """Computed, and kept where there is room; float32 or wider, to be used up before the next tile."""
        product = self._empty(rows, entries)
        self.head.product(self.hidden[rows], entries, product)
        if self.kept is not None and rows.start < self.known:
            room = self.kept.room(entries, self.which)[rows]
            room.copy_(product[: room.shape[0]])
        return product

    def recall(self, rows: slice, entries: slice) -> Tensor:
        """What `form` gave: read where it was kept, otherwise computed again."""
        product, end = self._empty(rows, entries), max(rows.start, min(rows.stop, self.known))
        if self.kept is not None and end > rows.start:
            room, first = self.kept.room(entries, self.which), slice(rows.start, end)
            product[: end - rows.start] = room[first if self.order is None else self.order[first]]
        if end < rows.stop:
            self.head.product(self.hidden[end : rows.stop], entries, product[end - rows.start :])
        return product

    def _empty(self, rows: slice, entries: slice) -> Tensor:
        return self.tile.shaped(rows.stop - rows.start, entries.stop - entries.start)
