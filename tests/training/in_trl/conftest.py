"""Tiny runs that TRL carries out: a second each."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.hosts.trl.conftest import precision
from tests.training.conftest import TINY

from klamp.lab.config import TrainConfig

__all__ = ["precision", "quick"]

QUICK: dict[str, Any] = {
    **TINY,
    "backend": "trl",
    "beta": 0.5,
    "learning_rate": 2e-2,
    "warmup_steps": 0,
    "max_steps": 3,
    "eval_every": 0,
    "save_every": 0,
    "eval_size": 1,
}
"""Three steps that move the policy by half a nat."""


@pytest.fixture
def quick(config_of: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    return lambda **changes: config_of(**{**QUICK, **changes})
