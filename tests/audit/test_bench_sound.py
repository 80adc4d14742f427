"""No sound loss is accused, however unusual; and some of them are named."""

from __future__ import annotations

import pytest
from tests.audit.bench.sound import sound_cases
from tests.audit.bench.worlds import Score, run, three_worlds, verdict_of, worth_of

FLOORS = {"policies": 0.258, "kls": 0.2, "means": 0.258, "whole": 0.258, "klamp": 0.7, "advantages": 0.0}
"""Part -> the share that is named at least. KLs alone are the part that the candidates hold least of."""


def in_turn(part: str, step: int, *, watched: bool) -> Score:
    """Each case, or some of them, in one world; the worlds in turn."""
    score, worlds = Score(f"{part}, watched={watched}"), three_worlds()
    for number, case in enumerate([*sound_cases(part)][::step]):
        world = worlds[number % 3]
        verdict = verdict_of(case, world.watch() if watched else world)
        score.add(case.name, worth_of(case, verdict), verdict)
    return score


def test_the_bench_has_more_than_fifty_losses() -> None:
    assert len([*sound_cases()]) > 150


@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused_where_it_is_watched(part: str) -> None:
    score = in_turn(part, 6 if part == "klamp" else 1, watched=True)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)
    assert score.share() >= FLOORS[part], str(score)


@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused(part: str) -> None:
    score = in_turn(part, 24 if part == "klamp" else 12, watched=False)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused_in_any_world(part: str, watched: bool) -> None:
    worlds = [w.watch() if watched else w for w in three_worlds()]
    score = run(part, sound_cases(part), worlds)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)
    assert score.share() >= FLOORS[part], str(score)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old_logprobs", "sampler_logprobs", "advantages", "beta"])
def test_none_is_accused_where_less_is_passed(name: str) -> None:
    score, worlds = Score(f"without {name}"), three_worlds()[:2]
    for number, case in enumerate(sound_cases()):
        verdict = verdict_of(case, worlds[number % 2], **{name: None})
        score.add(case.name, worth_of(case, verdict), verdict)
    assert score.counts["accused"] == 0, str(score)
