"""A hundred runs that are killed, with the seed of the record in docs/records/reliability.md."""

from __future__ import annotations

import pytest
from tests.reliability.kills import AT_RANDOM, Ground, Kill, plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("kill", plan(100, seed=0), ids=str)
def test_a_killed_run_ends_as_one_that_never_was(ground: Ground, kill: Kill) -> None:
    outcome = ground.strike(kill)
    assert outcome.differs == []
    assert outcome.hits or kill.blows[0].point == AT_RANDOM, "the run was alive at the point that was aimed at"
