"""Keys and values of prompts, copied for the completions that share them, with room for what is still to be written.

transformers appends to a cache by making a new one, token after token: with long prompts a generation copies more than
it computes. Here memory is taken for many tokens at once, and each token is written into it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

AHEAD = 128
"""Tokens that memory is taken for at once: copies become rare, and little is taken for completions that end early."""


class RoomyLayer(DynamicLayer):
    """A layer of a cache that appends in place; for passes without gradient.

    Its keys and values are the used part of longer tensors. Where those are full, longer ones take their place.
    """

    keys: Any
    values: Any
    held: tuple[Tensor, Tensor]
    """The longer tensors, [B, heads, room, width] each."""

    @classmethod
    def of(cls, layer: DynamicLayer, rows: Tensor, room: int) -> RoomyLayer:
        """Some rows of a layer, each as often as asked for; so many tokens are to come."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        made._take(rows, min(room, AHEAD))
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values: all of them, with what was there."""
        start, more = self.get_seq_length(), key_states.shape[-2]
        if start + more > self.held[0].shape[-2]:
            self._take(torch.arange(len(self.keys), device=self.keys.device), max(more, AHEAD))
        for held, states in zip(self.held, (key_states, value_states), strict=True):
            held[:, :, start : start + more] = states
        self._use(start + more)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep some of the rows, in the order given."""
        self._take(beam_idx, self.held[0].shape[-2] - self.get_seq_length())

    def _take(self, rows: Tensor, room: int) -> None:
        length, found = self.keys.shape[-2], []
        for states in (self.keys, self.values):
            held = states.new_empty(len(rows), states.shape[1], length + room, states.shape[3])
            held[:, :, :length] = states[rows]
            found.append(held)
        self.held = (found[0], found[1])
        self._use(length)

    def _use(self, length: int) -> None:
        self.keys, self.values = (held[:, :, :length] for held in self.held)


def cache_rows(cache: Any, rows: Tensor, *, room: int = 0) -> Any:
    """A copy of a cache with some of its rows, each as often as asked for.

    Args:
        cache: of transformers; it is left as it is.
        rows: [B] which.
        room: tokens that will be appended to it at most, without gradient; 0: with gradient, or nobody knows.
    """
    found = copy.copy(cache)
    found.layers = [_layer_rows(layer, rows, room) for layer in cache.layers]
    return found


def _layer_rows(layer: Any, rows: Tensor, room: int) -> Any:
    if room and type(layer) is DynamicLayer and layer.get_seq_length():
        return RoomyLayer.of(layer, rows, room)
    made: Any = copy.copy(layer)
    # recurrent layers hold their states in lists, which would be shared
    vars(made).update({k: copy.copy(v) for k, v in vars(made).items() if isinstance(v, list | dict)})
    made.reorder_cache(rows)
    return made
