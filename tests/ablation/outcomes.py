"""Outcomes as runs leave them, made up."""

from collections.abc import Mapping, Sequence
from typing import Any

from klamp.lab.ablate.results import Outcome

BEFORE = {"addition": 0.62, "subtraction": 0.97, "reversal": 0.99}


def outcome(arm: str = "beta=0.01", seed: int = 0, **changes: Any) -> Outcome:
    given: dict[str, Any] = {
        "values": {"beta": 0.01},
        "rl_skill": "addition",
        "before": BEFORE,
        "after": {"addition": 0.9, "subtraction": 0.93, "reversal": 0.95},
        "numbers": {"kl/reverse": 0.08, "kl/forward": 0.1, "length": 4.0},
    }
    return Outcome(**{"run": f"{arm}_seed-{seed}", "arm": arm, "seed": seed, **given, **changes})


def failed(arm: str = "beta=0.01", seed: int = 0, error: str = "RewardError: the judge | is out\nto lunch") -> Outcome:
    return Outcome(run=f"{arm}_seed-{seed}", arm=arm, seed=seed, values={"beta": 0.01}, state="failed", error=error)


def sweep(values: Sequence[Mapping[str, Any]], *, seeds: int = 3) -> list[Outcome]:
    """A sweep in which a larger beta means less KL and less forgetting: a run per arm and seed."""
    found = []
    for arm in values:
        for seed in range(seeds):
            kl = (0.4 + 0.05 * seed) / (1 + 20 * arm.get("beta", 0.0))
            after = {"addition": 0.8 + 0.01 * seed, "subtraction": 0.97 - 0.9 * kl, "reversal": 0.99 - 0.7 * kl}
            numbers = {"kl/reverse": kl, "kl/reverse_sequence": 4 * kl, "kl/forward": 1.4 * kl, "reward": 0.8}
            name = " ".join(f"{key}={value}" for key, value in arm.items())
            found.append(outcome(name, seed, values=arm, after=after, numbers=numbers))
    return found
