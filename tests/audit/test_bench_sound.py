"""No sound loss is accused, however unusual; and some of them are named."""

from __future__ import annotations

import pytest
from tests.audit.bench.sound import sound_cases
from tests.audit.bench.worlds import BETA, Score, run, three_worlds, verdict_of, worth_of

FLOORS = {"policies": 0.5, "kls": 0.2, "means": 0.3, "whole": 0.4, "klamp": 0.7, "advantages": 0.0}
"""Part -> the share that is named at least; the whole bench has a floor of 0.258."""


def in_turn(part: str) -> Score:
    """Each case in one world, the worlds in turn; KLs in the reward differ little, so that a third will do."""
    score, worlds = Score(part), three_worlds()
    step = 3 if part in ("advantages", "klamp") else 1
    for number, case in enumerate(sound_cases(part)):
        if number % step == 0:
            verdict = verdict_of(case, worlds[number // step % 3])
            score.add(case.name, worth_of(case, verdict), verdict)
    return score


def test_the_bench_has_more_than_fifty_losses() -> None:
    assert len([*sound_cases()]) > 150


@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused(part: str) -> None:
    score = in_turn(part)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)
    assert score.share() >= FLOORS[part], str(score)


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("part", FLOORS)
def test_none_is_accused_in_any_world(part: str, watched: bool) -> None:
    worlds = [w.watch() if watched else w for w in three_worlds()]
    score = run(part, sound_cases(part), worlds)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)
    assert score.share() >= FLOORS[part], str(score)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["old", "sampler", "advantages", "beta"])
def test_none_is_accused_where_less_is_passed(left_out: str) -> None:
    worlds = three_worlds()[:2]
    score = Score(left_out)
    for number, case in enumerate(sound_cases()):
        name = {"old": "old_logprobs", "sampler": "sampler_logprobs"}.get(left_out, left_out)
        verdict = verdict_of(case, worlds[number % 2], **{name: None})
        score.add(case.name, worth_of(case, verdict), verdict)
    assert BETA and score.counts["accused"] == 0, str(score)
