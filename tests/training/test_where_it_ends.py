"""Where real runs end, and what the controls of a KL do in them."""

import copy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from tests.training import tabular
from tests.training.conftest import steps_taken, tiny_llama

from klamp.doctor.readers import read_record
from klamp.lab.anchors import MovingReference
from klamp.lab.backends import launch, train_run
from klamp.lab.checkpoint import checkpoints
from klamp.lab.config import TrainConfig

pytestmark = pytest.mark.slow

BETA = 0.3
QUIET = {"eval_every": 0, "save_every": 0, "log_completions": 0, "report_to": (), "cpu": True}
RUN: dict[str, Any] = QUIET | {
    "reward": "tests.training.tabular:reward",
    "prompts_per_step": 64,
    "num_generations": 8,
    "max_completion_length": tabular.LONGEST,
    "max_steps": 400,
    "learning_rate": 0.05,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "beta": BETA,
    "eval_size": 1,
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


SIZES: dict[str, Any] = QUIET | {"prompts_per_step": 16, "max_steps": 40, "learning_rate": 3e-4, "eval_size": 128}
"""Ten seeds, by one thread and by two: addition 0.94 to 1.00, a skill that is kept 0.99 or more, an exact KL of 0.11 to
0.16 nats; TRL ends at 0.76 to 1.48 of that.
"""


def test_every_loop_learns_it_and_ends_as_far_away(default_base_model, tmp_path):
    configs = {
        backend: TrainConfig.from_flat(SIZES | {"backend": backend, "output_dir": str(tmp_path / backend)})
        for backend in ("local", "trl")
    }
    summary = train_run(configs["local"])
    assert summary.before["addition"] < 0.8, "0.77"
    assert min(summary.after.values()) > 0.85
    launch(configs["trl"], [])
    here, there = ([row.metrics for row in read_record(tmp_path / backend).rows] for backend in configs)
    assert sum(row["reward"] for row in there[-10:]) > sum(row["reward"] for row in there[:10])
    for name in ("kl/exact", "kl/k3"):
        ours, theirs = (fmean(row[name] for row in rows[-10:]) for rows in (here, there))
        assert 1 / 4 < theirs / ours < 4
        assert name == "kl/k3" or 0.02 < ours < 0.6


def distance(reference: torch.nn.Module, policy: torch.nn.Module) -> float:
    pairs = zip(reference.parameters(), policy.parameters(), strict=True)
    return float(torch.cat([(a.double() - b.double()).flatten() for a, b in pairs]).norm())


def test_an_averaging_reference_in_bfloat16_arrives_at_a_policy_that_stands_still(tmp_path):
    """In bfloat16 alone 97 % of the distance is left: a hundredth of 2 % of a weight is below its last bit."""
    reference = tiny_llama().bfloat16()
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.02)
    moving = MovingReference(reference, decay=0.99)
    start = distance(moving.model, policy)
    for step in range(1, 1001):
        moving.after_step(policy, step)
    assert distance(moving.model, policy) < 1e-3 * start
    assert {p.dtype for p in moving.model.parameters()} == {torch.bfloat16}
    save_model(moving.average, str(tmp_path / "reference.safetensors"))
    resumed = MovingReference(tiny_llama().bfloat16(), decay=0.99)
    load_model(resumed.average, str(tmp_path / "reference.safetensors"))
    for reference in (moving, resumed):
        reference.after_step(tiny_llama(), 1001)
    for one, other in ((moving.model, resumed.model), (moving.average, resumed.average)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_after_a_reset_the_kl_is_zero_and_the_kl_to_the_original_is_not(context_of):
    moving = {"reference": "periodic", "reference_reset_steps": 3}
    *_, third, fourth = steps_taken(context_of(beta=0.01, learning_rate=2e-2, **moving), 4)
    assert third["kl/k3"] > 1e-6
    assert third["kl/k3"] == pytest.approx(third["kl/k3_original"], rel=1e-4)
    assert abs(fourth["kl/k3"]) < 1e-8
    assert fourth["kl/k3_original"] > 1e-6


def test_an_early_stop_leaves_the_remaining_updates_out(context_of):
    often = {"num_iterations": 4, "learning_rate": 3e-2, "warmup_steps": 0}
    free, held = (steps_taken(context_of(**often, **more), 4) for more in ({}, {"kl_early_stop": 1e-3}))
    assert all(s["policy/updates"] == 4 for s in free)
    cut = [s for s in held if s["policy/updates"] < 4]
    assert cut and all(s["policy/kl_old"] > 1e-3 for s in cut)
    assert all(s["policy/updates"] >= 1 for s in held)


def test_metrics_at_beta_zero_on_request_and_the_update_is_that_of_beta_zero(context_of):
    plain, watched = (steps_taken(context_of(beta=0, **more), 4) for more in ({}, {"kl_monitor": True}))
    assert "kl/k3" not in plain[-1] and watched[-1]["kl/k3"] > 0
    for a, b in zip(plain, watched, strict=True):
        assert {name: b[name] for name in a} == a
