"""The TRL examples, run as a user runs them, a few steps each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from klamp.lab.models import load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
DEBUG = {"debug/kl_mean", "debug/kl_max", "debug/kl_min", "debug/ref_logp_mean", "debug/policy_logp_mean"}


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(autouse=True)
def base_model(default_base_model: Path) -> None:
    """The built-in model is taught before an example asks for it."""


def rows_file(path: Path) -> Path:
    task = load_task(TaskConfig(train_size=16), load_tokenizer("builtin"))
    rows = [{"question": example.prompt, "answer": example.answer} for example in task.train]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("beta", ["0.04", "0.0"])
def test_the_command_line_of_the_k3_bug_report(tmp_path, beta):
    data = rows_file(tmp_path / "data.jsonl")
    arguments = ["--datasets", f"{data},,train[:12]", "--kl-beta", beta, "--batch-size", "32", "--num-generations", "4"]
    arguments += ["--max-steps", "3", "--lora-r", "4", "--learning-rate", "0.01", "--output-dir", str(tmp_path / "out")]
    printed = run("examples/trl_train.py", "train", *arguments, "--report-to", "tensorboard")
    assert ("klamp's" in printed) == (beta != "0.0")
    (folder,) = {path.parent for path in (tmp_path / "out").rglob("events.*")}
    events = EventAccumulator(str(folder)).Reload()
    tags = {tag.removeprefix("train/") for tag in events.Tags()["scalars"]}
    if beta == "0.0":
        assert not DEBUG & tags
        return
    assert tags >= DEBUG
    last = {name: events.Scalars(f"train/{name}")[-1].value for name in DEBUG}
    assert 0 <= last["debug/kl_min"] <= last["debug/kl_mean"] <= last["debug/kl_max"]
    assert last["debug/kl_max"] > 0
    assert last["debug/policy_logp_mean"] != last["debug/ref_logp_mean"]


def test_the_demonstration_of_kl_clipping(tmp_path):
    printed = run("examples/trl_kl_clipping.py", "--steps", "2", "--out", str(tmp_path))
    runs = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))
    assert list(runs) == ["baseline", "soft, per token", "soft, total", "hard, per token"]
    assert all(len(rows) == 2 and rows[-1]["kl/k3_sequence"] > 0 for rows in runs.values())
    budgets = [rows[-1].get("kl/budget") for rows in runs.values()]
    assert budgets[0] is None
    assert budgets[2] == pytest.approx(0.175)
    assert budgets[1] == budgets[3] == pytest.approx(0.05 * runs["hard, per token"][-1]["kl/reference_length"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(arm in printed for arm in runs)
