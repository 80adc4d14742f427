"""How much memory tensors take at once, counted and not measured: the same on every machine, with every allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
    """The storage of a tensor, as a number."""
    return x.untyped_storage()._cdata
