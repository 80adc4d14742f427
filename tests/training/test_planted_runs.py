"""Broken runs of the kinds that people have, each found by the alarm that is meant for it; sound ones are quiet.

`test_alarms.py` plants faults of the machinery; here nothing is wrong but what the run was asked to do. Every run was
tried with several seeds: on another processor the same seed gives another course.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import disturb, stored, tiny_llama
from tests.training.planted import ARITHMETIC, Told, alarms, found, trained

from klamp.diagnostics.alarms_reward import TRUNCATED
from klamp.training.trainer import Trainer

pytestmark = pytest.mark.slow

BUILT_IN: dict[str, Any] = {**ARITHMETIC, "prompts_per_step": 8, "warmup_steps": 5}
TINY_REWARD: dict[str, Any] = {
    "beta": 0.0,
    "scale_rewards": "none",
    "max_completion_length": 24,
    "prompts_per_step": 6,
    "num_generations": 8,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
}
"""A small random model that takes up any reward within some tens of steps."""


@pytest.mark.usefixtures("default_base_model")
def test_a_learning_rate_a_hundred_times_too_high(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, **{**BUILT_IN, "learning_rate": 1e-2, "warmup_steps": 10, "max_steps": 40})
    collapse, far = found(diagnosis, "reward-collapse"), found(diagnosis, "kl-far")
    assert max(collapse.first_step, far.first_step) <= 25
    for finding in (collapse, far):
        assert finding.evidence.causes[0].startswith("the learning rate (up to 0.0")
    assert "raise beta" not in collapse.alarm.next_step, "beta was not the fault"
    assert found(diagnosis, "saturated").first_step > collapse.first_step


@pytest.mark.usefixtures("default_base_model")
def test_a_learning_rate_thirty_times_too_high(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, **{**BUILT_IN, "learning_rate": 3e-3, "warmup_steps": 10, "max_steps": 20})
    for name in ("reward-collapse", "kl-far"):
        assert "the learning rate" in found(diagnosis, name).evidence.causes[0]


def test_a_policy_that_drifts_for_nothing(llama: str, tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        told.after_step = lambda step: disturb(trainer.context.policy, seed=step, size=0.008)

    changes = {"reward": "tests.training.rewards:constant", "beta": 0.0, "kl_monitor": True, "prompts_per_step": 12}
    diagnosis = trained(tmp_path, plant=plant, model=llama, max_steps=32, **changes)
    assert found(diagnosis, "kl-growing").first_step >= 30


def test_a_reward_that_pays_for_length(gpt2: str, tmp_path: Path) -> None:
    changes = {**TINY_REWARD, "reward": "tests.training.rewards:long", "learning_rate": 2e-3, "max_steps": 30}
    diagnosis = trained(tmp_path, model=gpt2, **changes)
    exploited = found(diagnosis, "length-exploited")
    assert exploited.evidence.causes[0].startswith("the reward pays for length")
    assert "truncated" not in {each.alarm.name for each in diagnosis.findings}, "the limit is not the fault"


def test_a_reward_that_one_word_satisfies(gpt2: str, tmp_path: Path) -> None:
    changes = {**TINY_REWARD, "reward": "tests.training.rewards:sevens", "max_completion_length": 12, "max_steps": 60}
    diagnosis = trained(tmp_path, model=gpt2, **changes)
    assert "in a pair that was in their completion before" in found(diagnosis, "repetition").evidence.text


def test_a_reward_that_is_the_same_for_all(llama: str, tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, model=llama, reward="tests.training.rewards:constant", max_steps=20)
    saturated = found(diagnosis, "saturated")
    assert saturated.first_step == 20 and saturated.evidence.causes[0].startswith("every completion earns the same")


@pytest.mark.usefixtures("default_base_model")
def test_a_beta_that_lets_nothing_be_learned(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, **{**BUILT_IN, "beta": 50.0, "max_steps": 12})
    assert alarms(diagnosis) == {"kl-dominates"}
    assert "a nat of a completion costs 50 of reward" in found(diagnosis, "kl-dominates").evidence.text


@pytest.mark.usefixtures("default_base_model")
@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"beta": 1e-4}, "of the reward's strength"),
        (
            {"kl_clip_method": "hard", "kl_clip_threshold": 0.5, "kl_reference_length": 5, "learning_rate": 1e-4},
            "exceeded the clip's budget",
        ),
    ],
)
def test_a_kl_that_does_nothing(tmp_path: Path, changes: dict[str, Any], seen: str) -> None:
    run = {**BUILT_IN, "learning_rate": 3e-4, "beta": 0.01, "max_steps": 40}
    diagnosis = trained(tmp_path, **{**run, **changes})
    assert alarms(diagnosis) == {"kl-inert"}
    assert seen in found(diagnosis, "kl-inert").evidence.text


def test_a_reference_from_a_wrong_path(llama: str, tmp_path: Path) -> None:
    other = tiny_llama()
    disturb(other, size=0.05)
    wrong = stored(other, tmp_path / "other")
    diagnosis = trained(tmp_path / "run", model=llama, ref_model=wrong, beta=0.05, max_steps=1)
    assert alarms(diagnosis) == {"reference-differs"}


@pytest.mark.usefixtures("default_base_model")
def test_a_limit_below_the_length_of_the_answers(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, **{**BUILT_IN, "max_completion_length": 2, "max_steps": 6})
    assert "as from the start" in found(diagnosis, "truncated").evidence.text


HEALTHY: dict[str, dict[str, Any]] = {
    "the default": {},
    "another seed": {"seed": 1},
    "no KL": {"beta": 0.0},
    "a KL that holds": {"beta": 1.0},
    "a target": {"target_kl": 0.05},
    "a tight target": {"target_kl": 0.02, "seed": 2},
    "an adapter": {"lora_r": 8, "learning_rate": 1e-3, "beta": 0.04},
    "advantages by the standard deviation": {"loss_type": "grpo", "scale_rewards": "std", "advantage_baseline": "mean"},
    "one reward per token of the batch": {"loss_type": "dapo", "seed": 3},
    "the KL in the reward": {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"},
    "the KL in the advantage": {"kl_placement": "advantage", "kl_estimator": "k1", "kl_horizon": "sequence"},
    "two updates per rollout": {"num_iterations": 2},
    "a moving reference": {"reference": "ema", "beta": 0.1},
    "small groups": {"num_generations": 4, "prompts_per_step": 16, "seed": 4},
    "the exact KL": {"kl_estimator": "exact", "seed": 5},
}


@pytest.mark.usefixtures("default_base_model")
@pytest.mark.parametrize("name", HEALTHY)
def test_sound_runs_are_quiet(name: str, tmp_path: Path) -> None:
    run = {**BUILT_IN, "learning_rate": 2e-4, "eval_size": 32, "max_steps": 40}
    diagnosis = trained(tmp_path, **{**run, **HEALTHY[name]})
    assert alarms(diagnosis) == set(), [finding.evidence.text for finding in diagnosis.findings]
    reward = [row.metrics["reward"] for row in diagnosis.history.rows]
    assert sum(reward[-10:]) > sum(reward[:10]), "it learned"


CUT: dict[str, Any] = {
    "reward": "tests.training.rewards:odd",
    "beta": 0.05,
    "max_completion_length": 2,
    "prompts_per_step": 6,
    "num_generations": 8,
    "learning_rate": 2e-3,
    "max_steps": 40,
}
"""Every answer is cut, from the start on, and rewarded all the same."""


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_answers_that_are_cut_by_design_are_quiet(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    diagnosis = trained(tmp_path, model=request.getfixturevalue(kind), **CUT)
    assert alarms(diagnosis) == set(), [finding.evidence.text for finding in diagnosis.findings]
    cut = [row.metrics["length/truncated"] for row in diagnosis.history.rows]
    assert min(cut) > TRUNCATED.value
