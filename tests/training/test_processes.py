"""Real processes: several that train as one, and ones that are killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.training import children
from tests.training.conftest import TINY, rows_of, steps_of
from tests.training.test_resume import assert_same_run

from klamp.training.config import TrainConfig
from klamp.training.trainer import train_run

pytestmark = pytest.mark.xdist_group("processes")

COMMON = {**TINY, "prompts_per_step": 4, "eval_size": 5, "beta": 0.05, "warmup_steps": 0}
HARD = {
    "gradient_accumulation_steps": 3,
    "kl_clip_method": "hard",
    "kl_clip_level": "batch",
    "kl_clip_threshold": 1e-3,
    "loss_type": "dapo",
    "num_iterations": 2,
    "kl_controller": "dual",
    "target_kl": 1e-3,
}
ADVANTAGE = {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence", "lora_r": 2}
EXACT = {"kl_estimator": "exact", "mask_truncated_completions": True, "kl_exclude_tokens": (5, 9), "loss_type": "bnpo"}
SAME = {"default": {}, "hard": HARD, "advantage": ADVANTAGE, "exact": EXACT}
"""What two processes must train as one does."""


@pytest.fixture(scope="module")
def pair(llama, tmp_path_factory):
    """Two processes over gloo train a list of jobs; one process trains those that must be the same."""
    folder = tmp_path_factory.mktemp("pair")

    def job(name: str, **changes):
        return {"model": llama, **COMMON, **changes, "output_dir": str(folder / name)}

    jobs = {name: job(f"two {name}", **changes) for name, changes in SAME.items()}
    broken = {"reward": "tests.training.rewards:breaks", "save_every": 0}
    # Evaluations have 9 prompts for the first process and 6 for the second, steps 8 completions for each.
    jobs["first fails"] = job("first fails", **broken) | {"break_at": {0: 9 + 16 + 9 + 3}}
    jobs["second fails"] = job("second fails", **broken) | {"break_at": {1: 6 + 16 + 6 + 3}}
    jobs["resumed"] = job("second fails", resume=True)
    jobs["odd"] = job("odd", prompts_per_step=3)
    ports, told = children.free_ports(len(jobs)), [folder / f"told-{rank}" for rank in range(2)]
    group = [
        children.start(children.one_of_several, rank, 2, ports, list(jobs.values()), str(told[rank])) for rank in (0, 1)
    ]
    for name, changes in SAME.items():
        train_run(TrainConfig.from_flat(job(f"one {name}", **changes)))
    codes = children.end(group)
    assert codes == [0, 0]
    ends = [dict(zip(jobs, json.loads(file.read_text()), strict=True)) for file in told]
    return SimpleNamespace(folder=folder, ends=ends)


def assert_close(one: Path, two: Path) -> None:
    """Every number of every line, to 1e-5 of it or of 1."""
    lines, others = rows_of(one), rows_of(two)
    assert [row["step"] for row in lines] == [row["step"] for row in others]
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name in line:
            assert other[name] == pytest.approx(line[name], rel=1e-5, abs=1e-5), f"{name} at step {line['step']}"


@pytest.mark.parametrize("name", SAME)
def test_two_processes_train_as_one(pair, name):
    assert pair.ends[0][name] == pair.ends[1][name] == "done"
    one, two = pair.folder / f"one {name}", pair.folder / f"two {name}"
    assert_close(one, two)
    rows = steps_of(one)
    assert len(rows) == 4 and rows[-1]["kl/exact"] > 1e-3, "something was learned"
    assert json.loads((two / "summary.json").read_text())["before"]


def test_the_harder_case_is_hard(pair):
    rows = steps_of(pair.folder / "two hard")
    assert {row["kl/over_budget"] for row in rows} == {0.0, 1.0}, "the batch's gate opens during the run"
    assert len({row["beta"] for row in rows}) > 2
    assert any(row["policy/ratio_clipped"] > 0 for row in rows)


def test_a_reward_that_fails_on_one_process_ends_both_with_the_state_saved(pair):
    for name, failing in (("first fails", 0), ("second fails", 1)):
        mine, other = pair.ends[failing][name], pair.ends[1 - failing][name]
        assert mine.startswith("RewardError") and "raised RuntimeError" in mine
        assert other.startswith("RewardError") and "another process" in other
        assert "the state after step 2 is saved" in pair.ends[0][name]
        assert (pair.folder / name / "checkpoints" / "step-000002").is_dir()


def test_two_processes_resume_with_the_same_numbers(pair):
    assert pair.ends[0]["resumed"] == pair.ends[1]["resumed"] == "done"
    assert_same_run(pair.folder / "two default", pair.folder / "second fails")


def test_prompts_that_do_not_divide_are_refused_on_every_process(pair):
    for ends in pair.ends:
        assert ends["odd"].startswith("ConfigError: the prompts of a step do not divide")
