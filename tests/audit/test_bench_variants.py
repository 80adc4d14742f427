"""Hand-written losses, right and wrong, are named as they are; and so are advantages, with a KL in them or without."""

from __future__ import annotations

from itertools import product

import pytest
from tests.audit.bench import advantages, variants
from tests.audit.bench.worlds import Score, make_world, three_worlds

SLOW = pytest.mark.slow


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_right_and_wrong_variants_are_named(number: int) -> None:
    assert len(variants.RIGHT) >= 25 and len(variants.WRONG) >= 30
    Score(product(variants.RIGHT + variants.WRONG, [three_worlds()[number]])).demand(0.98)


@pytest.mark.slow
def test_watched_variants_are_named() -> None:
    Score(product(variants.RIGHT + variants.WRONG, [w.watch() for w in three_worlds()])).demand(0.95)


@pytest.mark.parametrize("seed", [50, pytest.param(51, marks=SLOW), pytest.param(52, marks=SLOW)])
def test_forms_of_advantages_are_named(seed: int) -> None:
    score = Score(product(advantages.cases(), [make_world(seed, shape=(16, 12))]))
    assert len(score.rows) == 24
    score.demand(0.95)
