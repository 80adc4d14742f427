"""Hand-written losses, right and wrong, are named as they are; and so are advantages, with a KL in them or without."""

from __future__ import annotations

import pytest
from tests.audit.bench import advantages, variants
from tests.audit.bench.worlds import make_world, run, three_worlds

FLOOR = 0.95


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_right_and_wrong_variants_are_named(number: int) -> None:
    score = run("variants", variants.cases(), [three_worlds()[number]])
    assert len(score.rows) >= 55
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= FLOOR, str(score)


@pytest.mark.slow
def test_watched_variants_are_named() -> None:
    score = run("variants, watched", variants.cases(), [w.watch() for w in three_worlds()])
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= FLOOR, str(score)


@pytest.mark.parametrize(
    "seed", [50, pytest.param(51, marks=pytest.mark.slow), pytest.param(52, marks=pytest.mark.slow)]
)
def test_forms_of_advantages_are_named(seed: int) -> None:
    score = run("advantages", advantages.cases(), [make_world(seed, shape=(16, 12))])
    assert len(score.rows) == 24
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= FLOOR, str(score)
