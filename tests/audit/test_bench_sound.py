"""No sound loss is accused, however unusual; and some of them are named."""

from __future__ import annotations

from itertools import cycle, product

import pytest
from tests.audit.bench.sound import PARTS
from tests.audit.bench.worlds import Score, three_worlds

FLOORS = {"policies": 0.258, "kls": 0.2, "means": 0.258, "whole": 0.258, "klamp": 0.7, "advantages": 0.0}
"""Part -> the share that is named at least. KLs alone are the part that the candidates hold least of."""


def test_the_bench_has_more_than_fifty_losses() -> None:
    assert sum(map(len, PARTS.values())) >= 90


@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused(part: str) -> None:
    watched, step = [w.watch() for w in three_worlds()], 3 if part == "klamp" else 1
    Score(zip(PARTS[part][::step], cycle(watched), strict=False)).demand(FLOORS[part], misnamed=False)
    Score(product(PARTS[part][::4], three_worlds()[2:])).demand(misnamed=False)


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused_in_any_world(part: str, watched: bool) -> None:
    worlds = [w.watch() if watched else w for w in three_worlds()]
    Score(product(PARTS[part], worlds)).demand(FLOORS[part], misnamed=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old_logprobs", "sampler_logprobs", "advantages", "beta"])
def test_none_is_accused_where_less_is_passed(name: str) -> None:
    for cases in PARTS.values():
        Score(zip(cases, cycle(three_worlds()[:2]), strict=False), **{name: None}).demand()
