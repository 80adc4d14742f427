"""Outcomes as runs leave them, made up."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.ablation.results import Outcome

BEFORE = {"addition": 0.62, "subtraction": 0.97, "reversal": 0.99}


def outcome(arm: str = "beta=0.01", seed: int = 0, **changes: Any) -> Outcome:
    """A run that was done, with round numbers."""
    given: dict[str, Any] = {
        "run": f"{arm}_seed-{seed}",
        "arm": arm,
        "seed": seed,
        "values": {"beta": 0.01},
        "rl_skill": "addition",
        "before": BEFORE,
        "after": {"addition": 0.9, "subtraction": 0.93, "reversal": 0.95},
        "numbers": {"kl/reverse": 0.08, "kl/forward": 0.1, "length": 4.0, "seconds": 12.0},
    }
    return Outcome(**{**given, **changes})


def failed(arm: str = "beta=0.01", seed: int = 0, error: str = "RewardError: the judge | is out\nto lunch") -> Outcome:
    """A run that failed."""
    return Outcome(run=f"{arm}_seed-{seed}", arm=arm, seed=seed, values={"beta": 0.01}, state="failed", error=error)


def sweep(values: Sequence[Mapping[str, Any]], *, seeds: int = 3) -> list[Outcome]:
    """A sweep in which a larger beta means less KL, less forgetting, and less reward: a run per arm and seed."""
    found = []
    for number, arm in enumerate(values):
        name = " ".join(f"{key}={value}" for key, value in arm.items())
        for seed in range(seeds):
            draw = random.Random(f"{number}/{seed}")
            kl = 0.45 * math.exp(-6 * arm.get("beta", 0.0) ** 0.5) * (1 + 0.1 * number) * draw.uniform(0.8, 1.2)
            after = {
                "addition": min(1.0, 0.78 + 0.07 * math.exp(-((number - 2) ** 2) / 4) + draw.uniform(-0.02, 0.02)),
                "subtraction": max(0.0, 0.97 - 0.9 * kl + draw.uniform(-0.03, 0.0)),
                "reversal": max(0.0, 0.99 - 0.7 * kl + draw.uniform(-0.03, 0.0)),
            }
            found.append(outcome(name, seed, values=arm, after=after, numbers=_numbers(kl, draw)))
    return found


def _numbers(kl: float, draw: random.Random) -> dict[str, float]:
    length = draw.uniform(3.5, 4.5)
    return {
        "reward": draw.uniform(0.8, 0.9),
        "kl/reverse": kl,
        "kl/reverse_sequence": kl * length,
        "kl/forward": 1.4 * kl,
        "kl/forward_sequence": 1.4 * kl * length,
        "length": length,
        "entropy": draw.uniform(0.1, 0.2),
        "price": 0.0025,
        "seconds": draw.uniform(20, 30),
    }
