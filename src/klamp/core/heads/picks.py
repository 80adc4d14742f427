"""Some entries of each row of the logits, found while the tiles are walked: those asked for, and the k largest."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Entries of a tile that are looked at together: only where their largest is among a row's k is each one compared."""


class Picks:
    """The token ids that are asked for in each row, [N, K], sorted so that a tile finds its own at once.

    A row may name a token more than once: `rows` and `ids` hold each of its tokens once, [U]. `order` are the places
    [N K] where they were asked for, sorted, and `group` says which of the U stands there.
    """

    def __init__(self, ids: Tensor) -> None:
        self.height = len(ids)
        flat, self.order = torch.sort(ids.flatten(), stable=True)
        rows = self.order // max(1, ids.shape[1])
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = (flat[1:] != flat[:-1]) | (rows[1:] != rows[:-1])
        self.group = first.cumsum(0) - 1
        self.rows, self.ids = rows[first], flat[first]

    def within(self, rows: slice, entries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Which of the tokens lie in a tile, and their row and column there."""
        ends = torch.tensor((entries.start, entries.stop), device=self.ids.device)
        first, end = (int(place) for place in torch.searchsorted(self.ids, ends))
        found = torch.arange(first, end, device=self.ids.device)
        row = self.rows[found] - rows.start
        if rows.start > 0 or rows.stop < self.height:
            found, row = (x[(row >= 0) & (row < rows.stop - rows.start)] for x in (found, row))
        return found, row, self.ids[found] - entries.start


class Leaders:
    """The k largest entries of some rows and their ids, in the tiles that were seen so far."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = self.ids = torch.empty(0)

    def see(self, z: Tensor, start: int) -> None:
        """Takes in a tile, whose first column is the entry `start` of the vocabulary."""
        if self.values.numel() == 0:
            self.values, self.ids = z[:, :0], torch.empty_like(z[:, :0], dtype=torch.long)
        ids = torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
        if self.values.shape[1] == self.k > 0:
            z, ids = _challengers(z, ids, self.values.amin(1, keepdim=True))
        values, ids = torch.cat((self.values, z), 1), torch.cat((self.ids, ids), 1)
        best, order = values.topk(min(self.k, values.shape[1]), 1, sorted=False)
        self.ids = ids.gather(1, order)
        self.values = best.clamp_(min=torch.finfo(z.dtype).min)  # above what pads challengers, and is no entry

    def ranked(self) -> tuple[Tensor, Tensor]:
        """The entries and their ids, the largest first."""
        values, order = self.values.sort(1, descending=True)
        return torch.where(values > torch.finfo(values.dtype).min, values, -torch.inf), self.ids.gather(1, order)


def _challengers(z: Tensor, ids: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a tile above their row's limit, packed to the left, with some others; and their ids."""
    stride = z.shape[1] // BLOCK
    whole = z[:, : stride * BLOCK].view(len(z), BLOCK, stride)
    row, block = (whole.amax(1) > limit).nonzero(as_tuple=True)
    some = whole[row, :, block]
    which, member = (some > limit[row]).nonzero(as_tuple=True)
    row, column = row[which], member * stride + block[which]
    count = torch.bincount(row, minlength=len(z))
    place = torch.arange(len(row), device=z.device) - (count.cumsum(0) - count)[row]
    found = z.new_full((len(z), int(count.max())), -torch.inf)
    names = torch.zeros_like(found, dtype=torch.long)
    found[row, place], names[row, place] = some[which, member], ids[0, column]
    return torch.cat((found, z[:, stride * BLOCK :]), 1), torch.cat((names, ids[:, stride * BLOCK :]), 1)
