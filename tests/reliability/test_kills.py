"""Ten runs that are killed, wherever somebody lands a change, and a hundred; and the harness, which must notice."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reliability.kills import AT_RANDOM, FIRST, ONLY, Blow, Ground, Kill, plan
from tests.reliability.runs import differing
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


def doubled(name: str, run: Path) -> None:
    file = run / f"{name}.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")


def added(name: str, text: str, run: Path) -> None:
    with (run / name).open("a") as file:
        file.write(text)


def changed(name: str, change: dict[str, Any], run: Path) -> None:
    (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | change))


def one_bit_of_a_weight(run: Path) -> None:
    file = run / "checkpoints" / "step-000007" / "policy" / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(torch.int32).view(-1)[0] ^= 1
    save_file(weights, file, metadata={"format": "pt"})


def one_bit_of_a_moment(run: Path) -> None:
    file = run / "checkpoints" / "step-000006" / "optimizer.pt"
    moments = torch.load(file, weights_only=True)
    next(iter(moments["state"].values()))["exp_avg_sq"].view(torch.int32).view(-1)[0] ^= 1
    torch.save(moments, file)


def a_point_twice(run: Path) -> None:
    with SummaryWriter(run / "tracking", purge_step=8) as writer:
        writer.add_scalar("beta", 0.05, 7)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda run: None, ""),
    "a line of metrics twice": (partial(doubled, "metrics"), "metrics"),
    "a completion twice": (partial(doubled, "completions"), "completions"),
    "an answer twice": (partial(doubled, "answers"), "answers"),
    "an alarm too many": (partial(added, "alarms.jsonl", '{"step": 7, "name": "kl-far"}\n'), "alarms"),
    "a torn line": (partial(added, "metrics.jsonl", '{"step": 7, "rew'), "JSONDecodeError"),
    "one bit of a weight": (one_bit_of_a_weight, "weights of step-000007"),
    "one bit of a moment": (one_bit_of_a_moment, "moments of step-000006"),
    "a point that TensorBoard shows twice": (a_point_twice, "TensorBoard"),
    "a file too many": (lambda run: (run / "checkpoints" / ".step-000004.part").mkdir(), "files"),
    "another score": (partial(changed, "summary.json", {"steps": 6}), "summary"),
    "another state": (partial(changed, "checkpoints/step-000006/state.json", {"last_kl": 0.0}), "state of step-000006"),
}
"""What is done to a copy of an undisturbed run, and what then differs, alone."""


@pytest.mark.parametrize("what", SPOILED)
def test_what_differs_is_seen(ground: Ground, tmp_path: Path, what: str) -> None:
    spoil, wanted = SPOILED[what]
    holds = ground.undisturbed("controller").holds
    copied = shutil.copytree(ground.folder / "whole" / "controller", tmp_path / "copy")
    spoil(copied)
    assert [each.partition(":")[0] for each in differing(holds, copied)] == ([wanted] if wanted else [])
