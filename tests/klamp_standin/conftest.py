"""The stand-in for the Tinker service and its clients."""

from types import SimpleNamespace

import pytest
from tests.standin import reference, service, shared_standin, standin, trainer

from klamp_standin import futures

__all__ = ["clock", "reference", "service", "shared_standin", "standin", "trainer"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moments that the worker's clock shows, from 100 s on: only what is slept moves it."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now.append(now[-1] + seconds)

    monkeypatch.setattr(futures, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=sleep))
    return now
