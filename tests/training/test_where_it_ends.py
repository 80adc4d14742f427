"""Where `klamp train` ends, sampled and optimised as it is, on a model whose optimum is known in closed form."""

from pathlib import Path
from typing import Any

import pytest
from tests.training import tabular
from tests.training.conftest import steps_of

from klamp.doctor.readers import read_record
from klamp.lab.backends import launch, train_run
from klamp.lab.checkpoint import checkpoints
from klamp.lab.config import TrainConfig

pytestmark = pytest.mark.slow

BETA = 0.3
RUN: dict[str, Any] = {
    "reward": "tests.training.tabular:reward",
    "prompts_per_step": 64,
    "num_generations": 8,
    "max_completion_length": tabular.LONGEST,
    "max_steps": 400,
    "learning_rate": 0.05,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "beta": BETA,
    "eval_every": 0,
    "eval_size": 1,
    "save_every": 0,
    "log_completions": 0,
    "report_to": (),
    "cpu": True,
}


def ended(folder: Path, **changes: Any) -> tabular.Ended:
    model, task = tabular.make(folder / "model"), tabular.prompts(folder / "prompts.jsonl")
    run = folder / "run"
    train_run(TrainConfig.from_flat(RUN | {"model": model, "task": task, "output_dir": str(run)} | changes))
    policy = checkpoints(run)[-1] / "policy"
    return tabular.compare(tabular.logprobs(policy), tabular.logprobs(model), price=BETA)


@pytest.mark.parametrize(
    "kl",
    [
        {"kl_horizon": "sequence"},
        {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"},
        {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
        {"kl_horizon": "sequence", "kl_off_policy": "sequence", "num_iterations": 4},
    ],
    ids=["loss-k3-sequence", "reward-k1", "advantage-k1-sequence", "loss-k3-sequence-four-updates"],
)
def test_the_exact_settings_end_at_the_optimum(kl: dict[str, Any], tmp_path: Path) -> None:
    """At most 0.0009 with ten seeds, by one thread and by two."""
    assert ended(tmp_path, **kl).distance < 5e-3


def test_the_token_horizon_ends_further_from_the_reference(tmp_path: Path) -> None:
    """0.053 to 0.057 with ten seeds, by one thread and by two, at 1.12 to 1.17 of the optimum's KL."""
    found = ended(tmp_path)
    assert found.distance > 2e-2
    assert found.kl > 1.05 * found.optimal_kl


SIZES: dict[str, Any] = {"prompts_per_step": 16, "max_steps": 40, "learning_rate": 3e-4, "eval_size": 128}
SIZES |= {"eval_every": 0, "save_every": 0, "log_completions": 0, "report_to": ()}
"""Ten seeds, by one thread and by two: addition 0.94 to 1.00, a skill that is kept 0.99 or more, an exact KL of 0.11 to
0.16 nats; TRL ends at 0.76 to 1.48 of that.
"""


def scored(folder: Any, **changes: Any) -> dict[str, float]:
    """The KLs of a run's last ten steps, once it can add and kept the rest."""
    config = TrainConfig.from_flat({**SIZES, "output_dir": str(folder), **changes})
    summary = train_run(config)
    assert summary.before["addition"] < 0.8, "0.77"
    assert summary.after["addition"] > 0.85
    assert min(summary.after.values()) >= 0.85
    last = steps_of(folder)[-10:]
    return {name: sum(row[name] for row in last) / 10 for name in ("kl/exact", "kl/k3") if name in last[0]}


def test_every_loop_learns_it_and_ends_as_far_away(default_base_model, tmp_path):
    here = scored(tmp_path / "local", backend="local", cpu=True)
    launch(TrainConfig.from_flat({**SIZES, "output_dir": str(tmp_path / "trl"), "backend": "trl", "cpu": True}), [])
    rows = [row.metrics for row in read_record(tmp_path / "trl").rows]
    assert sum(row["reward"] for row in rows[-10:]) > sum(row["reward"] for row in rows[:10])
    by_trl = {name: sum(row[name] for row in rows[-10:]) / 10 for name in ("kl/exact", "kl/k3")}
    assert all(1 / 4 < by_trl[name] / here[name] < 4 for name in by_trl)
    assert 0.02 < here["kl/exact"] < 0.6
