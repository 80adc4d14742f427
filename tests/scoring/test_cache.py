"""Rows of a cache are a copy, and what is appended in place is what transformers would have appended."""

from __future__ import annotations

import pytest
import torch
from tests.training.conftest import tiny_llama
from transformers import DynamicCache

from klamp.scoring.model_parts import AHEAD, OpenedModel, RoomyLayer, Traits, cache_rows


@torch.no_grad()
@pytest.mark.parametrize("room", [0, 1, 5])
def test_rows_of_a_cache_are_a_copy(room: int) -> None:
    opened = OpenedModel(tiny_llama(), Traits(head=True, sharing="values"))
    mask = torch.ones(2, 3, dtype=torch.long)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    _, cache = opened.run(ids, mask, keep=1, use_cache=True)
    before = cache.layers[0].keys.clone()
    rows = cache_rows(cache, torch.tensor([1, 1, 0]), room=room)
    assert torch.equal(rows.layers[0].keys, before[[1, 1, 0]])
    opened.run(torch.tensor([[7], [8], [9]]), mask[[0, 0, 0]], keep=1, cache=rows)
    assert torch.equal(cache.layers[0].keys, before), "the cache that was given is as it was"


def states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of 2 heads of 3 numbers, and values of 4."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, tokens, width, generator=generator) for width in (3, 4))  # pyright: ignore


@pytest.mark.parametrize("room", [1, 4, 100])
def test_appending_in_place_is_appending(room: int) -> None:
    """Also past the room that was asked for, and after rows have been dropped."""
    cache, rows = DynamicCache(), torch.tensor([0, 0, 1])
    cache.update(*states(2, 5, seed=0), layer_idx=0)
    plain, roomy = cache_rows(cache, rows), cache_rows(cache, rows, room=room)
    assert type(plain.layers[0]) is not RoomyLayer is type(roomy.layers[0])
    for step, tokens in enumerate((1, 2, 1, 1)):
        if step == 2:
            for each in (plain, roomy):
                each.reorder_cache(torch.tensor([2, 0]))
        more = states(len(plain.layers[0].keys), tokens, seed=1 + step)
        expected, found = plain.update(*more, layer_idx=0), roomy.update(*more, layer_idx=0)
        assert all(map(torch.equal, expected, found))
        assert roomy.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize(("room", "tokens", "copies"), [(3, 3, 0), (3, 4, 1), (1000, AHEAD, 0), (1000, AHEAD + 1, 1)])
def test_memory_is_taken_for_many_tokens_and_not_for_all(room: int, tokens: int, copies: int) -> None:
    cache = DynamicCache()
    cache.update(*states(2, 5, seed=0), layer_idx=0)
    roomy = cache_rows(cache, torch.tensor([0, 1]), room=room)
    held = roomy.layers[0].held[0]
    assert held.shape[2] == 5 + min(room, AHEAD)
    places = [roomy.update(*states(2, 1, seed=step), layer_idx=0)[0].data_ptr() for step in range(tokens)]
    assert len(set(places)) == 1 + copies
