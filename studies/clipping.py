"""`python -m studies.clipping`: does a clip keep a policy from lengthening its completions for its KL?

The clipping notes (docs/sources.md) say that once the reward has saturated, a policy exploits the KL term by writing
more, and that a hard or soft threshold prevents it. The arms take that apart: a control without KL (nothing that
happens there is the KL's doing), both clips with both kinds of threshold under KL in the loss and in the reward, and
four other forms of the unclipped term, two of which ought to lengthen. What theory expects of each stands in
docs/records/clipping-study.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.ablation.plan import Arm, Plan, read_plan, runs
from klamp.cli.text import FAILED
from studies.command import ablate
from studies.fillers import REWARD, model_folder, teach
from studies.saturation import write_saturation

NAME = "clipping"

BASE: Mapping[str, Any] = {
    "reward": REWARD,
    "beta": 0.1,
    "loss_type": "grpo",
    "scale_rewards": "none",
    "advantage_baseline": "mean",
    "prompts_per_step": 16,
    "num_generations": 8,
    "max_completion_length": 24,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 150,
    "eval_every": 0,
    "save_every": 0,
    "keep_checkpoints": 1,
    "eval_size": 128,
    "log_completions": 64,
    "log_completions_every": 10,
    "report_to": (),
}
"""What all arms share, beside the base model. Advantages are not divided by their standard deviation: with the KL in
the reward beta would drop out. The rate is constant, so that the policy still moves once the reward has saturated."""

PLACES: Mapping[str, Mapping[str, Any]] = {
    "loss": {},
    "reward": {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"},
}
"""Where the KL enters. Both are paid per nat of the completion's KL and divided by its length, so one beta is right."""

PER_TOKEN, TOTAL = 0.03, 0.5
"""Budgets: nats per token of the reference length (about 0.22 nats per completion), and the clipping notes' default
as a total. With a reward of 1 a completion of this task is about 0.6 nats away from the reference."""

CLIPS: Mapping[str, Mapping[str, Any]] = {
    f"{method} {kind}": {
        "kl_clip_method": method,
        "kl_clip_threshold": threshold,
        "use_per_token_kl_threshold": kind == "per token",
        **({"kl_clip_temperature": temperature} if method == "soft" else {}),
    }
    for method in ("hard", "soft")
    for kind, threshold, temperature in (("per token", PER_TOKEN, 0.02), ("total", TOTAL, 0.05))
}
"""The soft clip's temperature is a tenth of its budget; at 1 it would be half open everywhere."""

CONTROL = Arm(name="no KL", values={"beta": 0.0, "kl_monitor": True})
"""The arm without a KL in its loss; its KL is measured all the same."""

FORMS: tuple[Arm, ...] = (
    Arm(name="loss, k3 as printed", values={"kl_gradient": "own"}),
    Arm(name="loss, k1 as printed", values={"kl_estimator": "k1", "kl_gradient": "own"}),
    Arm(name="loss, sequence horizon", values={"kl_horizon": "sequence"}),
    Arm(
        name="loss, sequence horizon, fixed divisor",
        values={"kl_horizon": "sequence", "kl_normalizer": "fixed_length", "beta": 0.32},
    ),
)
"""The unclipped term in other forms: what TRL and Unsloth differentiate; k1 as a loss; the whole gradient of
the mean over a completion's own length; and of a mean over a fixed length, with beta for the same price per nat."""


def clipping_plan(*, seeds: Sequence[int] = (0, 1, 2), base: Mapping[str, Any] | None = None) -> Plan:
    """The plan of the clipping study.

    Args:
        seeds: that every arm is run with.
        base: fields to set otherwise than `BASE`, in all arms that do not set them themselves.
    """
    placed = tuple(
        Arm(name=place if clip is None else f"{place}, {clip}", values={**values, **CLIPS.get(clip or "", {})})
        for place, values in PLACES.items()
        for clip in (None, *CLIPS)
    )
    shared = {"model": model_folder(), **BASE, **(base or {})}
    return Plan(name=NAME, base=shared, arms=(CONTROL, *placed, *FORMS), seeds=tuple(seeds))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, then write its own table and picture beside those of any ablation; returns the exit code.

    Args:
        argv: see `studies.command.ablate`; None: those of this process.
    """
    teach()
    code, folder = ablate(clipping_plan(), sys.argv[1:] if argv is None else argv)
    if code in (0, FAILED):
        for file in write_saturation(runs(read_plan(folder)), folder):
            print(f"wrote {file}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
