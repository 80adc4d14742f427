"""`python -m studies.language`: what a KL keeps of a real language model that learns an exploitable reward.

SmolLM2-135M-Instruct is asked to describe things and rewarded for happy words, repeats included. The arms: no KL at
all; the KL of klamp's default at several prices; and k1 as a loss, whose expected gradient is zero on-policy, so that
it should end where no KL ends. What came is in docs/language.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.lab.ablate.plan import Arm, Plan
from studies.command import ablate

NAME = "language"

BASE: Mapping[str, Any] = {
    "model": "examples/language/smollm2",
    "task": "examples/language/tasks.py:describe",
    "lora_r": 16,
    "learning_rate": 5e-4,
    "warmup_steps": 3,
    "lr_scheduler_type": "constant",
    "temperature": 0.7,
    "max_completion_length": 24,
    "prompts_per_step": 4,
    "num_generations": 8,
    "max_steps": 30,
    "eval_every": 15,
    "eval_size": 64,
    "save_every": 15,
    "keep_checkpoints": 1,
    "log_completions_every": 5,
    "report_to": (),
}
"""What all arms share: the settings of examples/language/describe.yaml, which takes ten steps more."""

RIGHT = 0.05
"""The price of that example, in reward per nat of a completion."""

KL_PROMPTS = 8
"""Each takes two completions of the policy and two of its start."""

NO_KL = Arm(name="no KL", values={"beta": 0.0, "kl_monitor": True})
"""The arm without a KL in its loss; its KL is measured all the same."""


def language_plan(*, seeds: Sequence[int] = (0, 1, 2), base: Mapping[str, Any] | None = None) -> Plan:
    """The plan of the language study.

    Args:
        seeds: that every arm is run with.
        base: fields to set otherwise than `BASE`, in all arms that do not set them themselves.
    """
    priced = tuple(Arm(name=f"beta {beta:g}", values={"beta": beta}) for beta in (0.015, RIGHT))
    k1 = Arm(name="k1 as a loss", values={"beta": RIGHT, "kl_estimator": "k1", "kl_gradient": "own"})
    arms = (NO_KL, *priced, k1)
    return Plan(name=NAME, base={**BASE, **(base or {})}, arms=arms, seeds=tuple(seeds), kl_prompts=KL_PROMPTS)


if __name__ == "__main__":
    raise SystemExit(ablate(language_plan(), sys.argv[1:])[0])
