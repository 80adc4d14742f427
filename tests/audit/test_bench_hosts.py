"""The losses of Liger, torchrl, verl and OpenRLHF, and distillation losses; TRL's trainer: tests/hosts/trl."""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import pytest
from tests.audit.bench import hosts
from tests.audit.bench.worlds import Score, make_world

SLOW = pytest.mark.slow


def needs(package: str) -> Any:
    """A mark that skips a test, visibly, where a package is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: {package} is not installed")


HOSTS = {"liger_kernel": hosts.liger, "torchrl": hosts.torchrl, "verl": hosts.verl, "openrlhf": hosts.openrlhf}


@pytest.mark.parametrize("watched", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("host", [pytest.param(x, marks=needs(name)) for name, x in HOSTS.items()])
def test_losses_of_other_trainers_are_named(host: Any, watched: bool) -> None:
    world = make_world(70 + watched, shape=(8, 12), lag=0.25)
    Score(product(host(), [world.watch() if watched else world])).demand(0.889 if watched else 0.829)


@needs("trl")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_distillation_losses_are_named_by_their_logits(seed: int) -> None:
    score = Score(product(hosts.distillations(hosts.make_sequences(seed)), [make_world()]))
    assert len(score.rows) == 18
    score.demand(0.894)
