"""verl as it was before each test: what `register` changes is put back."""

from __future__ import annotations

import pytest
import verl.trainer.ppo.core_algos as algorithms
from verl.workers.utils import losses

from klamp.verl import register


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is registered in the test is gone after it."""
    for module, name in ((algorithms, "kl_penalty"), (algorithms, "get_kl_controller"), (losses, "kl_penalty")):
        monkeypatch.setattr(module, name, getattr(module, name))
    registry = dict(algorithms.POLICY_LOSS_REGISTRY)
    monkeypatch.setattr(algorithms, "POLICY_LOSS_REGISTRY", registry)


@pytest.fixture
def registered(untouched: None) -> None:
    """klamp's names mean something for the length of the test."""
    register()
