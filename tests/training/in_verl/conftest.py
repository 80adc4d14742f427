"""Configurations of small runs by verl, which is not started here."""

from collections.abc import Callable

import pytest

from klamp.lab.config import TrainConfig


@pytest.fixture
def quick(config_of: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    return lambda **changes: config_of(**{"backend": "verl", "max_prompt_length": 20, "cpu": False, **changes})
