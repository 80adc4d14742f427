"""Products of hidden states and head, kept from the forward to the backward pass at no cost in memory.

The backward pass needs memory for the weight gradient, [V, H], in any case. Here it is allocated in the forward pass
already, and lent: the slice of it that belongs to c vocabulary entries holds c H numbers, which are the products of H
rows with these entries (of H / 2 rows where there are two heads, policy and reference). The backward pass goes through
the vocabulary slice by slice; it reads the products of a slice, all rows, and then writes the gradient over them. A
product is kept as the head rounded it, in the type of the weight, so the backward pass sees the very number that the
forward pass saw. Rows beyond the first H are computed again.
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
        """The memory for the products of one head with these vocabulary entries, [rows, entries]."""
        size = self.rows * (entries.stop - entries.start)
        return self.d_weight[entries].view(-1)[head * size : (head + 1) * size].view(self.rows, -1)


# Each call between its forward and its backward pass, by its weight. Nothing here keeps it alive but its graph.
_waiting: WeakValueDictionary[Owner, Kept] = WeakValueDictionary()


def owner_of(weight: Tensor) -> Owner:
    """A key that is the same for a weight and for its detached copies: the device and address of its memory."""
    return weight.device, weight.data_ptr()


def keep(owner: Owner, hidden: Tensor, weight: Tensor, *, heads: int = 1) -> Kept | None:
    """Memory to keep products in; None where that is slower, or where another call of this weight holds some already.

    Two waiting calls with room each would be two [V, H] at a time, where the backward passes need one after the other.
    """
    if hidden.shape[0] == 0 or weight.numel() < KEEP_FROM or weight.shape[1] < heads or owner in _waiting:
        return None
    _waiting[owner] = kept = Kept(hidden, weight, heads)
    return kept


class Products:
    """The products of one head with the hidden states of a call, one tile after another in the same piece of memory."""

    def __init__(self, head: Head, hidden: Tensor, kept: Kept | None, *, which: int = 0) -> None:
        self.head, self.hidden, self.kept, self.which = head, hidden, kept, which
        self.order: Tensor | None = None
        self.known = 0 if kept is None else kept.rows
        self.tile = Tile(hidden)

    def of(self, index: Tensor | slice, hidden: Tensor) -> Products:
        """The products of some of the rows: the backward pass needs only the rows whose gradient is not 0."""
        some = Products(self.head, hidden, self.kept, which=self.which)
        if isinstance(index, Tensor):
            some.order = index[index < self.known]
            some.known = some.order.numel()
        return some

    def form(self, rows: slice, entries: slice) -> Tensor:
        """Computes the products of a tile, and keeps them where there is room; valid until the next tile."""
        product = self._empty(rows, entries)
        self.head.product(self.hidden[rows], entries, product)
        if self.kept is not None and rows.start < self.known:
            room = self.kept.room(entries, self.which)[rows]
            room.copy_(product[: room.shape[0]])
        return product

    def recall(self, rows: slice, entries: slice) -> Tensor:
        """The same products as `form` gave: read where they were kept, otherwise computed again."""
        product, end = self._empty(rows, entries), max(rows.start, min(rows.stop, self.known))
        if self.kept is not None and end > rows.start:
            room, first = self.kept.room(entries, self.which), slice(rows.start, end)
            product[: end - rows.start] = room[first if self.order is None else self.order[first]]
        if end < rows.stop:
            self.head.product(self.hidden[end : rows.stop], entries, product[end - rows.start :])
        return product

    def _empty(self, rows: slice, entries: slice) -> Tensor:
        return self.tile.shaped(rows.stop - rows.start, entries.stop - entries.start)
