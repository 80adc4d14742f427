"""Runs by a stand-in for verl's program: a second each."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from klamp.training.config import TrainConfig
from klamp.training.in_verl import overrides, run

STAND_IN = Path(__file__).with_name("stand_in.py")


def missing(name: str) -> str:
    """Stands in the place of `metadata.version` where a library is not installed."""
    raise PackageNotFoundError(name)


@pytest.fixture
def quick(config_of: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """The configuration of such a run in tmp_path/run, with some values changed."""
    return lambda **changes: config_of(**{"backend": "verl", "max_prompt_length": 20, "cpu": False, **changes})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the stand-in in verl's place; called with what it is to do."""

    def install(**told: Any) -> None:
        monkeypatch.setenv("STAND_IN", json.dumps(told))
        monkeypatch.setattr(overrides, "PROGRAM", (str(STAND_IN),))
        monkeypatch.setattr(run, "check_version", lambda host: "a stand-in")

    return install
