"""Translates the names of metrics and settings of other trainers into klamp's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from klamp.diagnostics.history import Settings, Verifier
from klamp.diagnostics.metrics import METRICS, RECORDED_NAMES

NAMES: Mapping[str, str] = {theirs: ours for names in RECORDED_NAMES.values() for theirs, ours in names.items()}
"""The name that another trainer uses -> klamp's name."""

STEP_NAMES = ("train/global_step", "global_step", "training/global_step", "step", "progress/batch", "_step")
"""The names under which a logged row may hold its step, the best first."""

EVALUATION_PREFIXES = ("eval/", "eval_", "val-core/", "test/")

SCORES = ("reward", "acc", "score", "mean@", "correct", "pass@")
"""Parts of a metric's name that say that it scores an evaluation."""

BY_POSITION = re.compile(r"kl/position/\d+_of_\d+")
"""The metrics by position, which have one row together in the table of metrics."""

OVER_UPDATES = "actor/kl_loss"
"""verl's name of a k3 that is a mean over all mini-batches and epochs of a step (train_mini_batch)."""

OURS = "policy/logp_mean"
"""A metric that only klamp logs, by which its runs are known."""

RULES = ("accuracy", "exact", "match", "math", "format", "verif", "correct", "rule", "regex", "gsm8k", "unit_test")
"""Parts of a reward function's name that say that it is a rule."""


def known(name: str) -> str | None:
    """The name that klamp has for a logged metric; None where it has none."""
    bare = name.removeprefix("train/")
    for candidate in (name, bare):
        if candidate in METRICS or BY_POSITION.fullmatch(candidate):
            return candidate
    return NAMES.get(name, NAMES.get(bare))


def translate(logged: Mapping[str, object]) -> dict[str, float]:
    """The known metrics of a logged row under klamp's names; where two mean the same, the first one is taken."""
    found: dict[str, float] = {}
    for name, value in logged.items():
        ours = known(name)
        if ours is not None and isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault(ours, float(value))
    return found


def evaluations(logged: Mapping[str, object], *, every: bool = False) -> dict[str, float]:
    """The scores of evaluations in a logged row: skill -> score.

    Args:
        logged: name -> value.
        every: whether every name is a score, as klamp logs them; else those that speak of rewards, accuracy and so on.
    """
    found: dict[str, float] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in EVALUATION_PREFIXES if name.startswith(prefix)), None)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if prefix and number and (every or (any(word in name for word in SCORES) and "std" not in name)):
            found[name.removeprefix(prefix)] = float(value)  # pyright: ignore[reportArgumentType]
    return found


def step_of(logged: Mapping[str, object]) -> int | None:
    """The step that a logged row belongs to."""
    for name in STEP_NAMES:
        value = logged.get(name)
        if isinstance(value, int | float):
            return int(value)
    return None


def verifier_of(rewards: list[str]) -> Verifier | None:
    """Whether all reward functions are rules, judged by their names; None where the names do not tell."""
    rules = [any(word in name.lower() for word in RULES) for name in rewards]
    return "rules" if rules and all(rules) else None


def reward_functions(logged: set[str]) -> list[str]:
    """Names of the reward functions, from metrics such as TRL's rewards/NAME/mean."""
    parts = [name.removeprefix("train/").split("/") for name in logged]
    return sorted(part[1] for part in parts if len(part) == 3 and part[0] == "rewards" and part[2] == "mean")


def settings_of(config: Mapping[str, object], logged: set[str]) -> Settings:
    """The settings of a run, as far as its arguments and the names of its metrics tell.

    Args:
        config: arguments as TRL or Unsloth name them, or none.
        logged: names of all metrics.
    """
    beta, loss, scale = config.get("beta"), config.get("loss_type"), config.get("scale_rewards")
    settings = Settings(verifier=verifier_of(reward_functions(logged)), k3_over_updates=OVER_UPDATES in logged)
    if isinstance(beta, int | float):
        settings = replace(settings, beta=float(beta))
    if isinstance(loss, str):
        settings = replace(settings, loss_type=loss)
    if scale not in (None, "None"):
        settings = replace(settings, scale_rewards="none" if scale in (False, "none", "False") else "std")
    return settings
