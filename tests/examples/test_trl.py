"""The TRL examples, run as a user runs them, a few steps each."""

import json
from pathlib import Path

import pytest
from tests.examples.conftest import DEBUG, built_in, run, scalars

from klamp.lab.models import load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig

pytestmark = [pytest.mark.slow, built_in]


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
    logged = {name.removeprefix("train/"): values[-1] for name, values in scalars(folder).items()}
    assert DEBUG & logged.keys() == (DEBUG if beta != "0.0" else set())
    if beta != "0.0":
        assert 0 <= logged["debug/kl_min"] <= logged["debug/kl_mean"] <= logged["debug/kl_max"] > 0
        assert logged["debug/policy_logp_mean"] != logged["debug/ref_logp_mean"]


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
