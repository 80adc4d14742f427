"""Tiles of logits: they cover everything once, and what is added up over them is what the whole matrix gives."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.core.heads.naive import head, naive_logprobs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs
from klamp.errors import ShapeError

# --- memory, counted and not measured: the same on every machine, with every allocator ------------------------------


class Held(TorchDispatchMode):
    """A context that counts the memory of the tensors which its operations make; gradients are counted with them.

    What an operation takes for itself and gives back before it ends is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """The most bytes that were held at once."""
        self.largest = 0
        """The bytes of the largest one."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for made in (x for x in tree_leaves(found) if isinstance(x, Tensor)):
            if id_of(made) not in given:  # a view, or what was written into
                storage = made.untyped_storage()
                self._alive[id_of(made)] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return found


def id_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


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


def test_a_head_without_words_is_refused() -> None:
    with pytest.raises(ShapeError, match="do not fit together"):
        linear_logprobs(torch.ones(2, 4), torch.zeros(0, 4), torch.zeros(2, dtype=torch.long))
