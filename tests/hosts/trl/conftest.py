"""A model, and a trainer whose policy has moved away from it: made once for each test file."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.hosts.trl.hosts import klamp_trainer, model, noisy


@pytest.fixture(scope="module")
def base() -> Any:
    return model()


@pytest.fixture(scope="module")
def trainer(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trainer")
    return klamp_trainer(noisy(base), folder, trainer={"ref_model": copy.deepcopy(base)}, beta=0.4, kl_monitor=True)
