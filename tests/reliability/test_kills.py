"""Ten runs that are killed, wherever somebody lands a change, and a hundred; and the harness, which must notice."""

import pytest
from tests.reliability.kills import AT_RANDOM, FIRST, ONLY, Blow, Ground, Kill, plan

TEN = (
    Kill(case="controller", blows=(Blow(point=AT_RANDOM, share=0.5),)),
    Kill(case="EMA", blows=(Blow(point="while a metrics line is written", share=0.6),)),
    Kill(case="periodic", blows=(Blow(point="while an old checkpoint is deleted", share=0.9),)),
    Kill(case="LoRA", blows=(Blow(point="while the configuration is written", share=0.0),)),
    Kill(
        case="several updates",
        blows=(
            Blow(point="after an optimizer step", share=0.6),
            Blow(point="while TensorBoard's file is written", share=0.4),
        ),
    ),
    Kill(case="several updates", blows=(Blow(point="while the state is saved", share=0.5),)),
    Kill(case="controller", blows=(Blow(point="before a checkpoint is in its place", share=0.5),)),
    Kill(case="LoRA", blows=(Blow(point="while the moments are saved", share=0.5),)),
    Kill(case="EMA", blows=(Blow(point="while the reference is saved", share=0.5),)),
    Kill(
        case="periodic",
        blows=(
            Blow(point="between a metrics line and TensorBoard", share=0.6),
            Blow(point="before a resume has cut the metrics", share=0.0),
        ),
    ),
)
"""Each case, and each kind of file."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("kills"))


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("kill", TEN, ids=str)
def test_a_killed_run_ends_as_one_that_never_was(ground: Ground, kill: Kill) -> None:
    outcome = ground.strike(kill)
    assert outcome.differs == []
    assert outcome.hits >= sum(blow.point != AT_RANDOM for blow in kill.blows), "the run was alive"


@pytest.mark.slow
@pytest.mark.parametrize("kill", plan(100, seed=1), ids=str)
def test_so_do_a_hundred_that_a_seed_draws(ground: Ground, kill: Kill) -> None:
    outcome = ground.strike(kill)
    assert outcome.differs == []
    point = kill.blows[0].point  # no alarm rises on some processors, and that point is then never reached
    if point != AT_RANDOM and ground.undisturbed(kill.case).passed[point]:
        assert outcome.hits, "the run was alive at the point that was aimed at"


def test_a_run_comes_by_all_that_it_can_be_killed_at(ground: Ground) -> None:
    learned = "while an alarm is written"  # whether one rises in seven steps, another seed decides otherwise
    for case in ("controller", "EMA"):
        passed = ground.undisturbed(case).passed
        missing = {point for point in FIRST if not passed[point]} - {learned}
        assert missing == {point for point, cases in ONLY.items() if case not in cases} - {learned}
