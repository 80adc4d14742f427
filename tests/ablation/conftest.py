"""Plans of runs that take a fraction of a second each, on the tiny Llama of the training tests."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.training.conftest import TINY, llama  # noqa: F401  (a fixture)

from klamp.lab.ablate.plan import Plan, grid

SMALL: dict[str, Any] = {**TINY, "eval_size": 3, "max_steps": 4}


@pytest.fixture
def plan_with(llama: str) -> Callable[..., Plan]:  # noqa: F811  (the fixture above)
    """A plan of tiny runs: two values of beta, two seeds, some values of the base changed."""

    def make(*, sweep: dict[str, Any] | None = None, seeds: tuple[int, ...] = (0, 1), **changes: Any) -> Plan:
        base = {"model": llama, **SMALL, **changes}
        return Plan(name="tiny", base=base, arms=grid(sweep or {"beta": [0.0, 0.05]}), seeds=seeds)

    return make
