"""A whole run of `klamp train --backend verl`: real verl, Ray, FSDP2 and vLLM, on the CPU.

Scores differ from run to run (verl draws its own sample), so that numbers are asserted within bounds.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines.verl.programs import LIMIT, started, training

from klamp.cli import main
from klamp.training.folders import lines_of

pytestmark = [pytest.mark.usefixtures("default_base_model"), pytest.mark.timeout(2 * LIMIT + 60)]

SIZES: dict[str, Any] = {
    "prompts_per_step": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_prompt_length": 16,
    "max_steps": 4,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "train_size": 64,
    "eval_size": 4,
    "eval_every": 0,
}
SAME = 1e-4
"""Bound on the difference between two kernels' probabilities of a token under the same weights, in float32."""


def run(folder: Path, *words: str, verl: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """A run to its last step, which leaves no process; what klamp logged of its steps."""
    with started([*training(folder, verl=verl, **SIZES | fields), *words], folder.parent / "around") as running:
        assert running.wait() == 0, running.said()[-5000:]
        assert running.left(patience=5) == {}
    rows = [row for row in lines_of(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == list(range(1, (SIZES | fields)["max_steps"] + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    return rows


def engine_differences(folder: Path) -> list[float]:
    """The largest difference of a token's probability in vLLM from that in the actor, at each step of the last run."""
    rows = [row["data"] for row in lines_of(folder / "verl" / "metrics.jsonl")]
    return [row[name] for row in rows if (name := "training/rollout_probs_diff_max") in row]


def grows(values: Sequence[float], *, to: float) -> bool:
    """Whether the values start at 0 and reach some bound."""
    return abs(values[0]) < 1e-6 and max(values) > to


def test_a_run_is_stopped_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, sizes = tmp_path / "run", {**SIZES, "max_steps": 8, "save_every": 1, "beta": 0.04}
    with started(training(folder, **sizes), tmp_path / "first") as running:
        running.wait_for('"step": 2', folder / "metrics.jsonl")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 130, running.said()[-3000:]
        assert running.left(patience=5) == {}
        assert "global_step_" in running.said(), "it names the checkpoint"
    rows = run(folder, "--resume", **sizes)
    assert grows([row["kl/k3"] for row in rows], to=0.01), "KL in the loss"
    differences = engine_differences(folder)
    assert len(differences) >= 4 and max(differences) < SAME, "vLLM follows the actor, from the checkpoint on"
    assert all(row["beta"] == 0.04 for row in rows)

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 8 and set(summary["before"]) == set(summary["after"]) != set()
    assert {"config.yaml", "versions.json", "log.txt", "verl"} <= {path.name for path in folder.iterdir()}
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0 and (folder / "report.html").is_file()
    assert main(["doctor", str(folder)]) in (0, 1), "it finds enough to judge"
    assert "8 logged steps" in capsys.readouterr().out
