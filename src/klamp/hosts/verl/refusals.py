"""The options of klamp that verl has no place for, each with the reason and the way out."""

from __future__ import annotations

from klamp.config import KLConfig
from klamp.errors import Refusal, refuse
from klamp.hosts.common.refusals import host_refusals


def check(kl: KLConfig) -> None:
    """Refuse what no hook of verl can carry.

    Raises:
        ConfigError: with the reason.
    """
    refuse(refusals(kl))


def refusals(kl: KLConfig) -> list[Refusal]:
    """What no hook of verl can carry, one row for each."""
    return [*host_refusals(kl, "verl"), *_term(kl), *_control(kl)]


def _term(kl: KLConfig) -> list[Refusal]:
    return [
        Refusal(
            kl.kl_placement == "advantage",
            "kl_placement='advantage' cannot be honoured by verl",
            why="what forms its advantages is not given the reference's log-probabilities",
            fix="set kl_placement='loss', or 'reward'",
        ),
        Refusal(
            kl.kl_estimator == "exact",
            "kl_estimator='exact' cannot be honoured by verl",
            why="its loss is given the log-probabilities of the sampled tokens alone",
            fix="use kl_estimator='k3'",
        ),
        Refusal(
            kl.kl_clip_method != "none",
            f"kl_clip_method={kl.kl_clip_method!r} cannot be honoured by verl",
            why="a clip is gated on the KL of a completion's group, and verl's micro-batches are packed by length: "
            "no hook ever sees a whole group",
            fix="leave kl_clip_method unset; klamp.trl and klamp train have it",
        ),
        Refusal(
            kl.excludes,
            "kl_exclude_* cannot be honoured by verl",
            why="its hooks are not given the tokens",
            fix="leave them unset; klamp.trl and klamp train have them",
        ),
        Refusal(
            kl.kl_normalizer is not None,
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured by verl",
            why="its loss_agg_mode averages the policy loss and the KL alike",
            fix="leave kl_normalizer unset, and set actor_rollout_ref.actor.loss_agg_mode",
        ),
        Refusal(
            kl.reference != "auto",
            f"reference={kl.reference!r} cannot be honoured by verl",
            why="it decides itself: the policy without its adapter where lora_rank is set, else a frozen copy",
            fix="leave reference unset",
        ),
        Refusal(
            kl.reference_dtype is not None,
            "reference_dtype cannot be honoured by verl",
            why="its own engine loads the reference",
            fix="leave reference_dtype unset",
        ),
    ]


def _control(kl: KLConfig) -> list[Refusal]:
    adaptive = kl.controller_name != "fixed"
    return [
        Refusal(
            adaptive and kl.kl_placement == "loss",
            f"kl_controller={kl.controller_name!r} cannot be honoured in verl's loss",
            why="its workers are given kl_loss_coef once, at the start, and no hook sees the KL of all of them",
            fix="leave target_kl unset, or set kl_placement='reward', where verl asks for the coefficient at every "
            "step",
        ),
        Refusal(
            kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0,
            "kl_schedule and kl_warmup_steps cannot be honoured by verl",
            why="its hooks are not told which step it is",
            fix="leave them unset",
        ),
        Refusal(
            kl.kl_lr_guard is not None,
            "kl_lr_guard cannot be honoured by verl",
            why="its hooks do not see the learning rate",
            fix="leave kl_lr_guard unset",
        ),
    ]
