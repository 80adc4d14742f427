"""A model, and a trainer whose policy has moved away from it: made once for each test file."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.hosts.trl.hosts import klamp_trainer, model, noisy


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """A test's own precision: arguments of transformers 4.56 put theirs into the environment, for all that follow."""
    name = "ACCELERATE_MIXED_PRECISION"
    kept = os.environ.get(name)
    yield
    if kept is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = kept


@pytest.fixture(scope="module")
def cheap_passes() -> Iterator[None]:
    """Fast scoring shares prompts of a few tokens too: a pass costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("klamp.scoring.completions.PASS_TOKENS", 0)
        yield


@pytest.fixture(scope="module")
def base() -> Any:
    return model()


@pytest.fixture(scope="module")
def teacher(base: Any) -> Any:
    return noisy(base, size=0.3, seed=9)


@pytest.fixture(scope="module")
def trainer(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trainer")
    return klamp_trainer(noisy(base), folder, trainer={"ref_model": copy.deepcopy(base)}, beta=0.4, kl_monitor=True)
