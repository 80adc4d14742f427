"""Runs with something wrong in the machinery or in what they were asked to do, and sound ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from tests.training import rewards
from tests.training.conftest import disturb, stored, tiny_gpt2, tiny_llama
from tests.training.planted import ARITHMETIC, Told, alarms, trained

from klamp.doctor.examine import Diagnosis
from klamp.lab import rollouts
from klamp.lab.anchors import MovingReference
from klamp.lab.loop import Trainer

Plant = Callable[[Trainer, Told, ExitStack], None]
Steps = tuple[int, int]

REWARDS = "tests.training.rewards:"
ANY: Steps = (1, 1000)


@dataclass(frozen=True, kw_only=True)
class Planted:
    changes: Mapping[str, Any]  # of a tiny run's configuration; `model` is llama or gpt2 (tiny, random), or builtin
    finds: Mapping[str, Steps] = field(default_factory=dict)  # alarm or note -> the steps between which it may rise
    alone: bool = False  # whether no other alarm may rise; notes may
    learns: bool = False  # whether the last ten steps must earn more than the first ten
    plant: Plant | None = None  # makes something wrong with the trainer; what it patches, the stack undoes

    def misses(self, diagnosis: Diagnosis) -> list[str]:
        """What is not as it must be, in words; empty if all is well."""
        first = {each.alarm.name: each.first_step for each in diagnosis.findings}
        said = [f"{name} is not found" for name in self.finds if name not in first]
        for name, (low, high) in self.finds.items():
            if name in first and not low <= first[name] <= high:
                said.append(f"{name} rose at step {first[name]}, not from {low} to {high}")
        if self.alone and (others := alarms(diagnosis) - self.finds.keys()):
            said.append(f"{', '.join(sorted(others))} should not be found")
        if self.learns and self.gain(diagnosis) <= 0:
            said.append("it learned nothing")
        return said

    @staticmethod
    def gain(diagnosis: Diagnosis) -> float:
        reward = [row.metrics["reward"] for row in diagnosis.history.rows]
        return fmean(reward[-10:]) - fmean(reward[:10])


def train(planted: Planted, folder: Path, **changes: Any) -> Diagnosis:
    """Train a run in folder/run with some values changed, and examine what it wrote."""
    values = {"model": "llama", **planted.changes, **changes}
    for name in ("model", "ref_model"):
        if values.get(name) in MODELS:
            values[name] = stored(MODELS[values[name]](), folder / values[name])
    with ExitStack() as undone:
        plant = planted.plant and partial(planted.plant, undone=undone)
        return trained(folder / "run", plant=plant, **values)


def _elsewhere() -> Any:
    model = tiny_llama()
    disturb(model)
    return model


MODELS: dict[str, Callable[[], Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2, "llama-elsewhere": _elsewhere}


# faults of the machinery ----------------------------------------------------------------------------------------------


def _adapter_not_zero(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    disturb(trainer.context.policy, size=0.02)


def _stale_sampler(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    """Completions come from the weights that the run began with: they are never synced."""
    real, old = rollouts.generate, copy.deepcopy(trainer.context.policy)

    def stale(model: Any, *args: Any, **kwargs: Any) -> Any:
        return real(model if kwargs["uniforms"] is None else old, *args, **kwargs)  # evaluations are greedy

    undone.enter_context(patch.object(rollouts, "generate", stale))


def _stale_and_exploding(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    _stale_sampler(trainer, told, undone)
    told.after_step = lambda step: disturb(trainer.context.policy, size=0.5) if step == 2 else None


def _reference_that_follows(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    trainer.context.reference = MovingReference(copy.deepcopy(trainer.context.policy), reset_steps=1)


def _one_wrong_update(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    told.after_step = lambda step: disturb(trainer.context.policy, size=0.1) if step == 8 else None


def _drift(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    told.after_step = lambda step: disturb(trainer.context.policy, seed=step, size=0.008)


def _mask_without_ends(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    real = rollouts.Rollout

    def without_ends(**fields: Any) -> Any:
        completions = fields["completions"]
        last = torch.zeros_like(completions.mask)
        last[torch.arange(len(last)), completions.mask.sum(-1) - 1] = True
        others = ~(last & completions.ended[:, None])
        masks = {name: fields[name] & others for name in ("mask", "kl_mask")}
        counts = (float(x) for x in (len(last), masks["mask"].sum(), masks["kl_mask"].sum()))
        return real(**fields | masks | {"totals": rollouts.Totals(*counts)})

    undone.enter_context(patch.object(rollouts, "Rollout", without_ends))


def _pay(trainer: Trainer, told: Told, undone: ExitStack) -> None:
    """Every further character takes something from the reward."""
    undone.enter_context(patch.dict(rewards.STATE, pay=-0.1))


# settings -------------------------------------------------------------------------------------------------------------

SCALED = {"loss_type": "grpo", "advantage_baseline": "mean"}
"""Advantages of the size 1, with which a few steps of a tiny model go far enough."""
BUILT_IN: dict[str, Any] = {**ARITHMETIC, "prompts_per_step": 8}
SOUND: dict[str, Any] = {**BUILT_IN, "learning_rate": 2e-4, "eval_size": 32, "max_steps": 40}
GROUPS: dict[str, Any] = {"prompts_per_step": 6, "num_generations": 8}
TINY_REWARD: dict[str, Any] = {"model": "gpt2", "beta": 0.0, "scale_rewards": "none", "max_completion_length": 24}
TINY_REWARD |= {**GROUPS, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
"""A small random model that takes up any reward within some tens of steps."""
PADDED = TINY_REWARD | {"reward": f"{REWARDS}seven", "beta": 0.1, "learning_rate": 2e-3, "max_steps": 40}
"""The first character is learned and costs most of the KL; every further one takes something from the reward."""
CUT: dict[str, Any] = {"reward": f"{REWARDS}odd", "beta": 0.05, "max_completion_length": 2, **GROUPS}
CUT |= {"learning_rate": 2e-3, "max_steps": 40}
"""Every answer is cut, from the start on, and rewarded all the same."""
IN_THE = {"kl_estimator": "k1", "kl_horizon": "sequence"}
LOW_TARGET: dict[str, Any] = {"target_kl": 1e-3, "kl_controller": "step"}
UNHELD: dict[str, Any] = {"beta": 0.0, "kl_monitor": True}
SHORT: dict[str, Any] = {**ARITHMETIC, "max_steps": 8}


def faulty(
    finds: Mapping[str, Steps], steps: int, plant: Plant | None = None, *, alone: bool = False, **changes: Any
) -> Planted:
    """A run of so many steps in which these alarms must rise."""
    return Planted(finds=finds, plant=plant, alone=alone, changes={"max_steps": steps, **changes})


DRAWN = {"advantage-scale": (1, 2)}
FAULTY: dict[str, Planted] = {
    "adapter-not-zero": faulty({"step-zero-kl": (1, 1)}, 1, _adapter_not_zero, lora_r=4),
    "adapter-not-synced": faulty({"sampler-mismatch": (2, 10)}, 22, _stale_sampler, lora_r=4, **SCALED),
    "exploded-not-synced": faulty(
        {"huge-values": (3, 3), "k3-far-above-k1": (3, 3), "sampler-mismatch": ANY}, 3, _stale_and_exploding, **UNHELD
    ),
    "reference-that-follows": faulty(
        {"detached-reference": ANY}, 22, _reference_that_follows, num_generations=8, learning_rate=1e-2
    ),
    "one-wrong-update": faulty({"kl-spike": (9, 9)}, 10, _one_wrong_update, **ARITHMETIC | {"prompts_per_step": 12}),
    "exploding-rate": faulty({"kl-spike": (2, 6), "kl-high": (2, 8)}, 8, learning_rate=1.0),
    "cut-answers": faulty({"truncated": (5, 5)}, 6, **ARITHMETIC | {"max_completion_length": 2}),
    "large-advantages": faulty(DRAWN, 2, reward=f"{REWARDS}hundred", scale_rewards="none"),
    "divided-noise": faulty(DRAWN, 2, reward=f"{REWARDS}nearly_equal", scale_rewards="std"),
    "low-target": faulty(
        {"beta-runaway": (12, 28)}, 28, **ARITHMETIC | SCALED | LOW_TARGET | {"beta": 0.1, "learning_rate": 3e-4}
    ),
    "lost-end-token": faulty({"end-token-lost": (1, 2)}, 2, _mask_without_ends, log_completions=12),
    "dr-grpo-with-a-rule": faulty({"dr-grpo-with-kl": (0, 1)}, 2, reward="", advantage_baseline="mean", beta=0.04),
    "lost-skill": faulty(
        {"retention": (12, 12)}, 12, **ARITHMETIC | {"learning_rate": 3e-3, "beta": 0.0, "eval_size": 32}
    ),
    "little-learning": faulty({"kl-low": (20, 20)}, 20, learning_rate=1e-6, prompts_per_step=1),
    "rate-hundredfold": faulty(
        {"reward-collapse": (3, 40), "kl-far": (3, 40), "saturated": (20, 40)},
        40,
        **BUILT_IN | {"learning_rate": 1e-2, "warmup_steps": 10},
    ),
    "drift": faulty({"kl-growing": (25, 32)}, 32, _drift, **UNHELD, reward=f"{REWARDS}constant", prompts_per_step=12),
    "one-word": faulty(
        {"repetition": ANY}, 60, **TINY_REWARD | {"reward": f"{REWARDS}sevens", "max_completion_length": 12}
    ),
    "constant-reward": faulty({"saturated": (20, 20)}, 20, reward=f"{REWARDS}constant"),
    "wrong-reference": faulty({"reference-differs": (1, 1)}, 1, alone=True, ref_model="llama-elsewhere", beta=0.05),
}
"""Runs with a fault, by the names of their records."""

ADAPTER: dict[str, Any] = {"lora_r": 8, "beta": 0.04}
_QUIET: dict[str, dict[str, Any]] = {
    "sound": SOUND,
    "sound-seed-1": {**SOUND, "seed": 1},
    "sound-beta-0": {**SOUND, "beta": 0.0},
    "sound-beta-1": {**SOUND, "beta": 1.0},
    "sound-target": {**SOUND, "target_kl": 0.05},
    "sound-tight-target": {**SOUND, "target_kl": 0.02, "seed": 2},
    "sound-adapter": {**SOUND, **ADAPTER, "learning_rate": 1e-3},
    "sound-by-std": {**SOUND, "loss_type": "grpo", "scale_rewards": "std", "advantage_baseline": "mean"},
    "sound-dapo": {**SOUND, "loss_type": "dapo", "seed": 3},
    "sound-in-the-reward": {**SOUND, "kl_placement": "reward", **IN_THE},
    "sound-in-the-advantage": {**SOUND, "kl_placement": "advantage", **IN_THE},
    "sound-two-updates": {**SOUND, "num_iterations": 2},
    "sound-moving-reference": {**SOUND, "reference": "ema", "beta": 0.1},
    "sound-small-groups": {**SOUND, "num_generations": 4, "prompts_per_step": 16, "seed": 4},
    "sound-exact": {**SOUND, "kl_estimator": "exact", "seed": 5},
    "short": {**ARITHMETIC, "max_steps": 22, "eval_size": 16},
    "short-adapter": {**SHORT, **ADAPTER, "max_steps": 16, "eval_size": 16, "seed": 1, "learning_rate": 3e-4},
    "short-beta-0": {**SHORT, "seed": 2, "beta": 0.0},
    "short-in-the-advantage": {**SHORT, "seed": 3, "kl_placement": "advantage", **IN_THE},
    "short-target": {**SHORT, "seed": 4, "target_kl": 0.05, "reference": "ema", "num_iterations": 2},
    "short-dr-grpo": {**SHORT, "seed": 5, "loss_type": "dr_grpo", "beta": 0.0},
    "cut-by-design-llama": CUT,
    "cut-by-design-gpt2": {**CUT, "model": "gpt2"},
}
LEARN = ("sound", "sound-beta-0")
"""Those that gain in forty steps with any seed; a KL that holds leaves some of the others where they were."""
QUIET: dict[str, Planted] = {
    **{name: Planted(changes=changes, alone=True, learns=name in LEARN) for name, changes in _QUIET.items()},
    "paid-for-shortness": Planted(changes=PADDED, plant=_pay, alone=True),
}
"""Runs in which no alarm may rise."""

RUNS = FAULTY | QUIET
RECORDED = (
    *FAULTY,
    *("sound", "sound-beta-0", "sound-target", "sound-in-the-reward", "sound-moving-reference", "short-adapter"),
    *("cut-by-design-gpt2", "paid-for-shortness"),
)
"""The names of the runs whose records lie in the tree; the others only run."""
