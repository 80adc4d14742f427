"""Ten runs that are killed, wherever somebody lands a change; and the harness, which must notice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reliability.kills import AT_RANDOM, FIRST, OF_A_RESUME, ONLY, Blow, Ground, Kill, plan
from tests.reliability.points import POINTS
from tests.reliability.runs import CASES, differing
from torch.utils.tensorboard import SummaryWriter

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
    Kill(case="two processes", blows=(Blow(point="while the state is saved", share=0.5),)),
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
"""Each case, and each kind of file: a hundred more, which a seed draws, are in test_hundred_kills.py."""


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


def test_every_point_and_case_has_its_turn() -> None:
    kills = plan(100, seed=0)
    assert kills == plan(100, seed=0) != plan(100, seed=1)
    assert {blow.point for kill in kills for blow in kill.blows} == {AT_RANDOM, *POINTS}
    assert {kill.case for kill in kills} == set(CASES) and {kill.blows[0].point for kill in kills} == {
        AT_RANDOM,
        *FIRST,
    }
    assert 1 < max(len(kill.blows) for kill in kills) and len(set(OF_A_RESUME)) == 2


def test_a_run_comes_by_all_that_it_can_be_killed_at(ground: Ground) -> None:
    learned = "while an alarm is written"  # whether one rises in seven steps, another seed decides otherwise
    for case in ("controller", "EMA"):
        passed = ground.undisturbed(case).passed
        missing = {point for point in FIRST if not passed[point]} - {learned}
        assert missing == {point for point, cases in ONLY.items() if case not in cases} - {learned}


# the comparison ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(ground: Ground, tmp_path: Path) -> Path:
    """The folder of an undisturbed run, to be spoiled."""
    ground.undisturbed("controller")
    return shutil.copytree(ground.folder / "whole" / "controller", tmp_path / "copy")


def found(ground: Ground, folder: Path) -> list[str]:
    return differing(ground.undisturbed("controller").holds, folder)


def test_a_copy_is_equal(ground: Ground, copied: Path) -> None:
    assert found(ground, copied) == []


@pytest.mark.parametrize("name", ["metrics", "completions", "answers"])
def test_a_line_that_is_there_twice_is_seen(ground: Ground, copied: Path, name: str) -> None:
    file = copied / f"{name}.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")
    assert found(ground, copied) == [name]


def test_an_alarm_too_many_is_seen(ground: Ground, copied: Path) -> None:
    with (copied / "alarms.jsonl").open("a") as file:
        file.write('{"step": 7, "name": "kl-far"}\n')
    assert "alarms" in found(ground, copied)


def test_a_torn_line_is_seen(ground: Ground, copied: Path) -> None:
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    (difference,) = found(ground, copied)
    assert difference.startswith("JSONDecodeError")


def test_one_bit_of_a_weight_is_seen(ground: Ground, copied: Path) -> None:
    file = copied / "checkpoints" / "step-000007" / "policy" / "model.safetensors"
    weights = load_file(file)
    first = next(iter(weights.values())).view(torch.int32).view(-1)
    first[0] ^= 1
    save_file(weights, file, metadata={"format": "pt"})
    assert found(ground, copied) == ["weights of step-000007"]


def test_one_bit_of_a_moment_is_seen(ground: Ground, copied: Path) -> None:
    file = copied / "checkpoints" / "step-000006" / "optimizer.pt"
    moments = torch.load(file, weights_only=True)
    next(iter(moments["state"].values()))["exp_avg_sq"].view(torch.int32).view(-1)[0] ^= 1
    torch.save(moments, file)
    assert found(ground, copied) == ["moments of step-000006"]


def test_a_point_that_tensorboard_shows_twice_is_seen(ground: Ground, copied: Path) -> None:
    with SummaryWriter(copied / "tracking", purge_step=8) as writer:
        writer.add_scalar("beta", 0.05, 7)
    assert found(ground, copied) == ["TensorBoard"]


def test_a_checkpoint_or_a_file_too_many_is_seen(ground: Ground, copied: Path) -> None:
    (copied / "checkpoints" / ".step-000004.part").mkdir()
    assert "files" in found(ground, copied)


def test_another_score_in_the_summary_or_the_state_is_seen(ground: Ground, copied: Path) -> None:
    file = copied / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 6}))
    state = copied / "checkpoints" / "step-000006" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"last_kl": 0.0}))
    assert found(ground, copied) == ["state of step-000006", "summary"]
