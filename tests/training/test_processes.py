"""Real processes: several that train as one, and ones that are killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.training import children
from tests.training.conftest import IN_ADVANTAGE, TINY, far_away, rows_of, steps_of
from tests.training.test_resume import assert_same_run

from klamp.training import checkpoint
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMON = {**TINY, "prompts_per_step": 4, "eval_size": 5, "beta": 0.05, "warmup_steps": 0}
HARD = {
    "gradient_accumulation_steps": 3,
    "kl_clip_method": "hard",
    "kl_clip_level": "batch",
    "kl_clip_threshold": 1e-3,
    "loss_type": "dapo",
    "num_iterations": 2,
    "kl_controller": "step",
    "target_kl": 1e-3,
}
BRIEF = {"max_steps": 2}  # a step from the start, and one from where that led
ADVANTAGE = {**IN_ADVANTAGE, "lora_r": 2, **BRIEF}
EXACT = {"kl_estimator": "exact", "mask_truncated_completions": True, "kl_exclude_tokens": (5, 9), "loss_type": "bnpo"}
EXACT |= BRIEF
SOFT = {
    "kl_clip_method": "soft",
    "kl_clip_level": "batch",
    "kl_clip_threshold": 0.8,
    "kl_clip_temperature": 0.25,
    "learning_rate": 1e-2,
}
SKIPPED = {"reward": "tests.training.rewards:half", "kl_clip_method": "hard", "kl_clip_threshold": 3.0, **BRIEF}
SAME = {"default": {}, "hard": HARD, "advantage": ADVANTAGE, "exact": EXACT, "soft": SOFT}
SAME |= {"skipped": SKIPPED}
"""What two processes must train as one does."""
AT_A_GATE = ("default", "hard", "skipped")
"""Those of them that are trained wherever somebody lands a change."""


def trained(folder: Path, same: Sequence[str], job: Any, others: Any = None) -> SimpleNamespace:
    """Two processes over gloo train a list of jobs; one process trains those that must be the same.

    Args:
        folder: where all of them lie.
        same: the names of those that must be the same.
        job: makes a job from its name and what it changes.
        others: further jobs for the two processes.
    """
    jobs = {name: job(f"two {name}", **SAME[name]) for name in same} | (others or {})
    ports, told = children.free_ports(len(jobs)), [folder / f"told-{rank}" for rank in range(2)]
    group = [
        children.start(children.one_of_several, rank, 2, ports, list(jobs.values()), str(told[rank])) for rank in (0, 1)
    ]
    for name in same:
        train_run(TrainConfig.from_flat(job(f"one {name}", **SAME[name])))
    codes = children.end(group)
    assert codes == [0, 0]
    ends = [dict(zip(jobs, json.loads(file.read_text()), strict=True)) for file in told]
    return SimpleNamespace(folder=folder, ends=ends)


def jobs_in(folder: Path, llama: str) -> Any:
    """What makes a job from its name and what it changes."""
    return lambda name, **changes: {"model": llama, **COMMON, **changes, "output_dir": str(folder / name)}


@pytest.fixture(scope="module")
def pair(llama, tmp_path_factory):
    """The runs that two processes train wherever somebody lands a change."""
    folder = tmp_path_factory.mktemp("pair")
    job, jobs = jobs_in(folder, llama), {}
    broken = {"reward": "tests.training.rewards:breaks", "save_every": 0}
    # Evaluations have 9 prompts for the first process and 6 for the second, steps 8 completions for each.
    jobs["first fails"] = job("first fails", **broken) | {"break_at": {0: 9 + 16 + 9 + 3}}
    jobs["second fails"] = job("second fails", **broken) | {"break_at": {1: 6 + 16 + 6 + 3}}
    jobs["resumed"] = job("second fails", resume=True)
    away = far_away(folder / "other")  # which is high after five steps
    jobs["stopped"] = job("stopped", stop_on=("kl-high",), max_steps=10, save_every=0, **away)
    return trained(folder, AT_A_GATE, job, jobs)


@pytest.fixture(scope="module")
def other_pair(llama, tmp_path_factory):
    """The others."""
    folder = tmp_path_factory.mktemp("other-pair")
    return trained(folder, [name for name in SAME if name not in AT_A_GATE], jobs_in(folder, llama))


def assert_close(one: Path, two: Path) -> None:
    """Every number of every line, to 1e-4 of it or 1e-5: updates carry the rounding of float32 sums on."""
    lines, others = rows_of(one), rows_of(two)
    assert [row["step"] for row in lines] == [row["step"] for row in others]
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name in line:
            assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), f"{name} at step {line['step']}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] if name in AT_A_GATE else []) for name in SAME]
)
def test_two_processes_train_as_one(name, request):
    pair = request.getfixturevalue("pair" if name in AT_A_GATE else "other_pair")
    assert pair.ends[0][name] == pair.ends[1][name] == "done"
    one, two = pair.folder / f"one {name}", pair.folder / f"two {name}"
    assert_close(one, two)
    rows = steps_of(one)
    assert len(rows) == SAME[name].get("max_steps", 4) and rows[-1]["kl/exact"] > 1e-6, "the policy moved"
    assert json.loads((two / "summary.json").read_text())["before"]


@pytest.mark.gate
def test_some_rows_are_skipped_and_some_are_not(pair):
    assert all(0 < row["policy/skipped"] < 1 for row in steps_of(pair.folder / "two skipped"))


def test_the_harder_case_is_hard(pair):
    rows = steps_of(pair.folder / "two hard")
    assert {row["kl/over_budget"] for row in rows} == {0.0, 1.0}, "the batch's gate opens during the run"
    assert len({row["beta"] for row in rows}) > 2
    assert any(row["policy/ratio_clipped"] > 0 for row in rows)


@pytest.mark.gate
def test_a_reward_that_fails_on_one_process_ends_both_with_the_state_saved(pair):
    for name, failing in (("first fails", 0), ("second fails", 1)):
        mine, other = pair.ends[failing][name], pair.ends[1 - failing][name]
        assert mine.startswith("RewardError") and "raised RuntimeError" in mine
        assert other.startswith("RewardError") and "another process" in other
        assert "the state after step 2 is saved" in pair.ends[0][name]
        assert (pair.folder / name / "checkpoints" / "step-000002").is_dir()


@pytest.mark.gate
def test_two_processes_resume_with_the_same_numbers(pair):
    assert pair.ends[0]["resumed"] == pair.ends[1]["resumed"] == "done"
    assert_same_run(pair.folder / "two default", pair.folder / "second fails")


@pytest.mark.gate
def test_an_alarm_that_the_main_process_sees_stops_both_after_the_same_step(pair):
    mine, other = (ends["stopped"] for ends in pair.ends)
    step = steps_of(pair.folder / "stopped")[-1]["step"]
    assert step == 5
    assert mine.startswith(f"TrainingStopped: training was stopped after step {step} of 10 by the alarm kl-high")
    assert other.startswith(f"TrainingStopped: training was stopped after step {step} of 10 by an alarm")
    assert [folder.name for folder in (pair.folder / "stopped" / "checkpoints").iterdir()] == [f"step-{step:06d}"]


# killed --------------------------------------------------------------------------------------------------------------

LONG = {**TINY, "beta": 0.05, "max_steps": 6, "eval_every": 2, "save_every": 3}


@pytest.mark.gate
@pytest.mark.parametrize(
    ("number", "code", "newest"),
    [(signal.SIGKILL, -signal.SIGKILL, 3), (signal.SIGTERM, 130, 5), (signal.SIGINT, 130, 5)],
)
def test_a_killed_run_resumes_with_the_same_numbers(config_of, tmp_path, number, code, newest):
    """Killed in its fifth step: without warning it loses the steps since its checkpoint, with warning none."""
    parts, here, on, told = (tmp_path / name for name in ("parts", "here", "on", "told"))
    config = config_of(**LONG, output_dir=str(parts))
    child = children.start(children.paused_run, config.flat(), 5, str(here), str(on), str(told))
    train_run(config_of(**LONG, output_dir=str(tmp_path / "whole")))
    children.wait_for(here)
    os.kill(child.pid, number)
    on.touch()
    assert children.end([child]) == [code]
    assert [p.name for p in checkpoint.checkpoints(parts)][-1] == f"step-{newest:06d}"
    if number != signal.SIGKILL:
        assert told.read_text().startswith("TrainingStopped\ntraining was stopped after step 5 of 6")
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # what a write that was cut short leaves behind
    train_run(config_of(**LONG, output_dir=str(parts), resume=True))
    assert_same_run(tmp_path / "whole", parts)


# launched ------------------------------------------------------------------------------------------------------------


def launched(command: list[str], **more: str) -> subprocess.Popen[str]:
    """A launcher, in a session of its own."""
    around = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "GLOO_SOCKET_IFNAME": "lo", **more}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | around, start_new_session=True, **pipes)


def test_the_launcher_and_the_command_give_the_same_numbers(llama, tmp_path):
    """`accelerate launch ... klamp train` on two processes, against one."""
    values = {**COMMON, "model": llama, "max_steps": 2}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", str(children.free_ports(1)[0])]
    command = [*launch, "-m", "klamp.cli", "train", "--config", str(config), "--output_dir", str(tmp_path / "two")]
    with launched(command) as two:
        train_run(TrainConfig.from_flat({**values, "output_dir": str(tmp_path / "one")}))
        said, _ = two.communicate(timeout=children.SECONDS)
    assert two.returncode == 0, said
    assert_close(tmp_path / "one", tmp_path / "two")
    assert len(steps_of(tmp_path / "two")) == 2


BASE: dict[str, Any] = {**TINY, "prompts_per_step": 2, "max_steps": 6, "eval_every": 0, "save_every": 1, "eval_size": 1}
BASE |= {"reward": "tests.training.rewards:faulty", "report_to": "none"}
IN_STEP_3 = 3 + 2 * 4 + 2
"""Calls of the reward in one process until there: an answer to each of three skills, then four a step."""

LOST = "the processes of the run lost each other"


def faulty(llama: str, folder: Path, fault: str, **changes: Any) -> subprocess.Popen[str]:
    """Two processes of `klamp train` under torchrun."""
    values = {**BASE, "model": llama, "output_dir": str(folder), **changes}
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "klamp.cli"]
    return launched([*launch, "train", *flags, "--cpu"], FAULT=fault)


def said_by(launcher: subprocess.Popen[str]) -> str:
    said, _ = launcher.communicate(timeout=children.SECONDS)
    assert launcher.returncode not in (0, None), said
    return said


def seconds_since(folder: Path) -> float:
    """How long ago the last step was written, which was just before a process died or hung."""
    return time.time() - (folder / "metrics.jsonl").stat().st_mtime


def newest(folder: Path) -> Path:
    """The newest checkpoint."""
    return max((folder / "checkpoints").glob("*-*[0-9]"), key=lambda each: int(re.split("[-_]", each.name)[-1]))


def test_one_that_dies_ends_the_others_with_the_newest_checkpoint_named(llama, tmp_path):
    said = said_by(faulty(llama, tmp_path / "run", f"exit:1:{IN_STEP_3}"))
    assert seconds_since(tmp_path / "run") < 60, "whatever process_timeout is"
    assert LOST in said and str(newest(tmp_path / "run")) in said
    assert re.search(r"rank\s*: 1 ", said), "torchrun says which one it was"
    assert said.count("Traceback") <= 1, "torchrun's own"


def test_under_trl_one_that_hangs_ends_the_others_after_the_time_limit(llama, tmp_path):
    said = said_by(faulty(llama, tmp_path / "run", f"hang:1:{IN_STEP_3}", backend="trl", process_timeout=10))
    assert LOST in said and "process_timeout=10 s" in said
    assert str(newest(tmp_path / "run")) in said
    assert said.count("Traceback") <= 1, "torchrun's own"


@pytest.mark.gate
def test_without_a_launcher_the_other_one_says_so_too(llama, tmp_path):
    """Where the first process is the one, which holds the store and writes the run's folder."""
    values = {**BASE, "model": llama, "output_dir": str(tmp_path / "run"), "process_timeout": 8.0, "report_to": ()}
    values["environment"] = {"FAULT": f"exit:0:{IN_STEP_3}"}
    ports, told = children.free_ports(1), [tmp_path / f"told-{rank}" for rank in range(2)]
    pair = [children.start(children.one_of_several, rank, 2, ports, [values], str(told[rank])) for rank in (0, 1)]
    children.wait_for(told[1])
    (end,) = json.loads(told[1].read_text())
    assert end.startswith(f"TrainerFailed: {LOST}") and str(newest(tmp_path / "run")) in end
    assert children.end(pair) == [7, 0]
