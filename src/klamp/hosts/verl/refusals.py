"""What verl has no place for; each with the reason and the way out."""

from __future__ import annotations

from klamp.config import KLConfig
from klamp.hosts.common.refusals import Refusal, host_refusals, refuse


def check(kl: KLConfig) -> None:
    """Refuse what no hook of verl's can carry.

    Raises:
        ConfigError: with the reason.
    """
    refuse([*host_refusals(kl, "verl"), *_term(kl), *_control(kl)])


def _term(kl: KLConfig) -> list[Refusal]:
    return [
        (
            kl.kl_placement == "advantage",
            "kl_placement='advantage' cannot be honoured by verl",
            "what forms its advantages is not given the reference's log-probabilities",
            "set kl_placement='loss', or 'reward'",
        ),
        (
            kl.kl_estimator == "exact",
            "kl_estimator='exact' cannot be honoured by verl",
            "its loss is given the log-probabilities of the sampled tokens alone",
            "use kl_estimator='k3'",
        ),
        (
            kl.kl_clip_method != "none",
            f"kl_clip_method={kl.kl_clip_method!r} cannot be honoured by verl",
            "a clip is gated on the KL of a completion's group, and verl's micro-batches are packed by length: no hook "
            "ever sees a whole group",
            "leave kl_clip_method unset; klamp.trl and klamp train have it",
        ),
        (
            kl.excludes,
            "kl_exclude_* cannot be honoured by verl",
            "its hooks are not given the tokens",
            "leave them unset; klamp.trl and klamp train have them",
        ),
        (
            kl.kl_normalizer is not None,
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured by verl",
            "its loss_agg_mode averages the policy loss and the KL alike",
            "leave kl_normalizer unset, and set actor_rollout_ref.actor.loss_agg_mode",
        ),
        (
            kl.reference != "auto",
            f"reference={kl.reference!r} cannot be honoured by verl",
            "it decides itself: the policy without its adapter where lora_rank is set, else a frozen copy",
            "leave reference unset",
        ),
        (
            kl.reference_dtype is not None,
            "reference_dtype cannot be honoured by verl",
            "its own engine loads the reference",
            "leave reference_dtype unset",
        ),
    ]


def _control(kl: KLConfig) -> list[Refusal]:
    adaptive = kl.controller_name != "fixed"
    return [
        (
            adaptive and kl.kl_placement == "loss",
            f"kl_controller={kl.controller_name!r} cannot be honoured in verl's loss",
            "its workers are given kl_loss_coef once, at the start, and no hook sees the KL of all of them",
            "leave target_kl unset, or set kl_placement='reward', where verl asks for the coefficient at every step",
        ),
        (
            kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0,
            "kl_schedule and kl_warmup_steps cannot be honoured by verl",
            "its hooks are not told which step it is",
            "leave them unset",
        ),
        (
            kl.kl_lr_guard is not None,
            "kl_lr_guard cannot be honoured by verl",
            "its hooks do not see the learning rate",
            "leave kl_lr_guard unset",
        ),
    ]
