"""Several processes, in the place of accelerate's: threads that wait for each other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from tests.waiting import SECONDS
from torch import Tensor

T = TypeVar("T")


class Member:
    """gather, reduce and pad as one process of several sees them."""

    def __init__(self, index: int, slots: list[Tensor], barrier: threading.Barrier) -> None:
        self.process_index, self._slots, self._barrier = index, slots, barrier

    def _everyones(self, x: Tensor) -> list[Tensor]:
        self._slots[self.process_index] = x
        self._barrier.wait(SECONDS)
        found = list(self._slots)
        self._barrier.wait(SECONDS)
        return found

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._everyones(x))

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return torch.stack(self._everyones(x)).sum(0)

    def pad_across_processes(self, x: Tensor, *, dim: int, pad_index: float) -> Tensor:
        assert dim == 0
        longest = max(len(y) for y in self._everyones(x))
        return torch.cat([x, x.new_full((longest - len(x), *x.shape[1:]), pad_index)])


def in_processes(count: int, work: Callable[[Any], T]) -> list[T]:
    """What each of so many processes makes of its accelerator."""
    slots, barrier = [torch.empty(0)] * count, threading.Barrier(count)
    members = [Member(i, slots, barrier) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, members))
