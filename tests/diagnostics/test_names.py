"""Names of other trainers."""

from __future__ import annotations

import pytest

from klamp.diagnostics.names import (
    evaluations,
    known,
    reward_functions,
    settings_of,
    step_of,
    translate,
    verifier_of,
)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("kl", "kl/k3"),
        ("train/kl", "kl/k3"),
        ("completions/clipped_ratio", "length/truncated"),
        ("train/grad_norm", "train/grad_norm"),
        ("grad_norm", "train/grad_norm"),
        ("reward", "reward"),
        ("train/reward", "reward"),
        ("kl/exact", "kl/exact"),
        ("actor/kl_loss", "kl/k3"),
        ("actor/ppo_kl", None),  # to the old policy, not to the reference
        ("completions/max_length", None),
        ("kl/position/3_of_8", "kl/position/3_of_8"),
        ("train/kl/position/3_of_8", "kl/position/3_of_8"),
        ("kl/position/x_of_8", None),
    ],
)
def test_known_names(theirs: str, ours: str | None) -> None:
    assert known(theirs) == ours


def test_a_row_is_translated_number_by_number() -> None:
    row = {"kl": 0.25, "train/kl": 9.0, "reward": None, "completions/mean_length": 7, "flag": True, "note": "x"}
    assert translate(row) == {"kl/k3": 0.25, "length/mean": 7.0}


def test_evaluations_are_scores() -> None:
    row = {
        "eval_reward": 0.5,
        "eval_reward_std": 0.1,
        "eval_rewards/accuracy_reward/mean": 0.25,
        "eval_runtime": 12.0,
        "eval/loss": 3.0,
        "val-core/gsm8k/acc/mean@8": 0.75,
        "reward": 1.0,
    }
    assert evaluations(row) == {"reward": 0.5, "rewards/accuracy_reward/mean": 0.25, "gsm8k/acc/mean@8": 0.75}
    assert evaluations({"eval/subtraction": 0.5, "reward": 1.0}, every=True) == {"subtraction": 0.5}


def test_steps() -> None:
    assert step_of({"train/global_step": 7, "_step": 3}) == 7
    assert step_of({"_step": 3}) == 3
    assert step_of({"loss": 3}) is None


def test_rules_by_their_names() -> None:
    assert verifier_of(["accuracy_reward", "think_format_reward"]) == "rules"
    assert verifier_of(["accuracy_reward", "reward-model-7b"]) is None
    assert verifier_of([]) is None
    assert reward_functions({"train/rewards/exact_match/mean", "rewards/helpful/mean", "rewards/helpful/std"}) == [
        "exact_match",
        "helpful",
    ]


@pytest.mark.parametrize(
    ("given", "scale"), [("group", "std"), (True, "std"), (False, "none"), ("none", "none"), (None, None)]
)
def test_settings(given: object, scale: str | None) -> None:
    settings = settings_of({"beta": 0, "loss_type": "dr_grpo", "scale_rewards": given}, {"rewards/math/mean"})
    assert (settings.beta, settings.loss_type, settings.scale_rewards) == (0.0, "dr_grpo", scale)
    assert settings.verifier == "rules"


def test_a_kl_over_all_updates_of_a_step_is_known_as_one() -> None:
    assert settings_of({}, {"actor/kl_loss", "actor/lr"}).k3_over_updates
    assert not settings_of({}, {"kl", "actor/reward_kl_penalty"}).k3_over_updates
