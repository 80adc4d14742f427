"""FSDP2 over two real processes trains as one process does, and its checkpoints are those of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.training import children, sharded
from tests.training.conftest import steps_of, stored, tiny_llama
from tests.training.test_processes import ADVANTAGE, COMMON, HARD, assert_close
from tests.training.test_resume import assert_same_run
from transformers import AutoModelForCausalLM

from klamp.training import checkpoint
from klamp.training.config import TrainConfig
from klamp.training.trainer import train_run

pytestmark = pytest.mark.slow

REWARD = {
    "kl_estimator": "k1",
    "kl_placement": "reward",
    "kl_horizon": "sequence",
    "loss_type": "dr_grpo",
    "reference": "ema",
    "reference_decay": 0.9,
}
EXACT = {"kl_estimator": "exact", "gradient_checkpointing": True, "lora_r": 2, "gradient_accumulation_steps": 2}
UNEQUAL = {"reward": "tests.training.rewards:half", "kl_clip_method": "hard", "kl_clip_threshold": 3.0}
"""Rows without a gradient, more of them on one process than on the other."""
SAME = {"default": {}, "hard": HARD, "advantage": ADVANTAGE, "exact": EXACT, "reward": REWARD, "unequal": UNEQUAL}
"""What two sharded processes must train as one does."""


@pytest.fixture(scope="module")
def pair(llama, tmp_path_factory):
    """Two processes train a list of jobs, sharded; one process trains those that must be the same."""
    folder = tmp_path_factory.mktemp("sharded")
    untied = stored(tiny_llama(tie_word_embeddings=False), tmp_path_factory.mktemp("untied"))

    def job(name: str, **changes):
        model = untied if changes.get("gradient_accumulation_steps") == 3 else llama
        return {"model": model, **COMMON, **changes, "output_dir": str(folder / name)}

    jobs = {name: job(f"two {name}", **changes) for name, changes in SAME.items()}
    broken = {"reward": "tests.training.rewards:breaks"}
    jobs["fails"] = job("fails", **broken) | {"break_at": {1: 6 + 16 + 6 + 3}}  # as in test_processes
    jobs["resumed"] = job("fails", resume=True)
    jobs["stopped"] = job("stopped", stop_on=("kl-high",), learning_rate=1.0, max_steps=10, save_every=0)
    ports, told = children.free_ports(len(jobs)), [folder / f"told-{rank}" for rank in range(2)]
    work = list(jobs.values())
    group = [children.start(sharded.one_of_several, rank, 2, ports, work, str(told[rank])) for rank in (0, 1)]
    for name, changes in SAME.items():
        train_run(TrainConfig.from_flat(job(f"one {name}", **changes)))
    codes = children.end(group)
    assert codes == [0, 0]
    ends = [dict(zip(jobs, json.loads(file.read_text()), strict=True)) for file in told]
    shares = [json.loads(Path(f"{file}-shares").read_text()) for file in told]
    return SimpleNamespace(folder=folder, ends=ends, shares=shares, jobs=len(jobs))


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (run / "checkpoints" / f"step-{step:06d}" / "policy").glob("*.safetensors")
    return load_file(file)


def test_each_process_holds_its_part_of_the_weights_only(pair):
    assert [len(shares) for shares in pair.shares] == [pair.jobs] * 2
    for mine, others in zip(*pair.shares, strict=True):
        assert mine + others == pytest.approx(1) and 0.4 < mine < 0.6


@pytest.mark.parametrize("name", SAME)
def test_two_sharded_processes_train_as_one(pair, name):
    assert pair.ends[0][name] == pair.ends[1][name] == "done"
    one, two = pair.folder / f"one {name}", pair.folder / f"two {name}"
    assert_close(one, two)
    rows = steps_of(one)
    assert len(rows) == 4 and rows[-1]["kl/exact"] > 1e-4, "something was learned"


@pytest.mark.parametrize("name", SAME)
def test_a_sharded_checkpoint_holds_what_that_of_one_process_holds(pair, name):
    one, two = pair.folder / f"one {name}", pair.folder / f"two {name}"
    for step in (2, 4):
        ours, theirs = weights_of(one, step), weights_of(two, step)
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
        paths = [run / "checkpoints" / f"step-{step:06d}" / "optimizer.pt" for run in (one, two)]
        ours, theirs = (torch.load(path, weights_only=True) for path in paths)
        assert theirs["param_groups"] == ours["param_groups"]
        torch.testing.assert_close(theirs["state"], ours["state"], rtol=1e-4, atol=1e-6)


def test_the_last_checkpoint_loads_as_any_model_does(pair):
    newest = checkpoint.newest(pair.folder / "two default")
    model = AutoModelForCausalLM.from_pretrained(newest / "policy")
    saved = weights_of(pair.folder / "one default", 4)
    found = {name: weight.detach() for name, weight in model.named_parameters()}
    assert found.keys() == saved.keys()
    torch.testing.assert_close(found, saved, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_has_the_same_numbers(pair):
    """An error, which may be of one process alone, leaves the newest checkpoint on disk."""
    assert pair.ends[1]["fails"].startswith("RewardError") and "raised RuntimeError" in pair.ends[1]["fails"]
    assert "the state after step 2 is saved" in pair.ends[0]["fails"]
    assert pair.ends[0]["resumed"] == pair.ends[1]["resumed"] == "done"
    assert_same_run(pair.folder / "two default", pair.folder / "fails")


def test_one_process_goes_on_from_a_sharded_checkpoint(pair, llama, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pair.folder / "two default", run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    values = {"model": llama, **COMMON, "output_dir": str(run), "resume": True}
    train_run(TrainConfig.from_flat(values))
    assert_close(pair.folder / "one default", run)


def test_an_alarm_stops_both_with_the_state_saved(pair):
    step = steps_of(pair.folder / "stopped")[-1]["step"]
    assert step < 10
    for ends in pair.ends:
        assert ends["stopped"].startswith(f"TrainingStopped: training was stopped after step {step} of 10 by")
    assert [folder.name for folder in (pair.folder / "stopped" / "checkpoints").iterdir()] == [f"step-{step:06d}"]


def test_float32_copies_are_split_saved_whole_and_resumed_bit_for_bit(llama, tmp_path):
    def job(name: str, **changes):
        return {"model": llama, **COMMON, "dtype": "bfloat16", **changes, "output_dir": str(tmp_path / name)}

    broken = job("parts", reward="tests.training.rewards:breaks") | {"break_at": {1: 6 + 16 + 6 + 3}}
    jobs = [job("whole"), broken, job("parts", resume=True)]
    ports, told = children.free_ports(len(jobs)), [str(tmp_path / f"told-{rank}") for rank in range(2)]
    group = [children.start(sharded.one_of_several, rank, 2, ports, jobs, told[rank]) for rank in (0, 1)]
    assert children.end(group) == [0, 0]
    whole, parts = (
        torch.load(checkpoint.newest(tmp_path / name) / "optimizer.pt", weights_only=True)["masters"]
        for name in ("whole", "parts")
    )
    assert {(type(x), x.dtype) for x in whole} == {(torch.Tensor, torch.float32)}
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
