"""The options of klamp that cannot work with Unsloth, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klamp.config import TRL_LOSS_TYPES, KLConfig
from klamp.core.types import Reduction
from klamp.errors import Refusal, check_name, refuse
from klamp.hosts.common.refusals import host_refusals
from klamp.hosts.trl.refusals import placement_refusals

LOSS_TYPES: Mapping[str, Reduction | None] = {**TRL_LOSS_TYPES, "bnpo": "token_mean"}
"""How Unsloth's loss types make tokens a number: as TRL's, but bnpo by the tokens of the whole batch."""


def check_arguments(kl: KLConfig, args: Any) -> None:
    """Refuse options that Unsloth makes impossible.

    Raises:
        UnknownNameError: a loss type that klamp does not know; names the nearest.
        ConfigError: with the reason.
    """
    check_name("loss_type", args.loss_type, LOSS_TYPES)
    refuse([*host_refusals(kl, "Unsloth"), *placement_refusals(kl, args), *_unsloth(kl, args)])


def check_batch(kl: KLConfig | None, output: Mapping[str, Any]) -> None:
    """Refuse what can only be seen in a generation batch.

    Raises:
        ConfigError: with the reason.
    """
    weighted = output.get("unsloth_sample_weight") is not None
    refuse(
        [
            Refusal(
                kl is not None and kl.excludes and weighted,
                "tokens cannot be left out of the KL under Unsloth's weights of whole completions",
                why="klamp divides the KL by the tokens that carry it, in the units of Unsloth's average; these "
                "weights are none",
                fix="unset UNSLOTH_GRPO_LOSS_AGGREGATION and UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE, or the kl_exclude_ "
                "fields",
            ),
        ]
    )


def _unsloth(kl: KLConfig, args: Any) -> list[Refusal]:
    own = LOSS_TYPES[args.loss_type]
    return [
        Refusal(
            kl.kl_estimator == "exact",
            "kl_estimator='exact' cannot be honoured by Unsloth",
            why="its loss is given the log-probabilities of the sampled tokens; the rows over the vocabulary are never "
            "kept",
            fix="set kl_estimator='k3'",
        ),
        Refusal(
            kl.kl_normalizer not in (None, own),
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured with loss_type={args.loss_type!r}",
            why=f"Unsloth normalises policy loss and KL together: {own}",
            fix="leave kl_normalizer unset, or choose the loss_type that normalises so",
        ),
        Refusal(
            kl.reference in ("ema", "periodic"),
            f"reference={kl.reference!r} cannot be attached to a trainer of Unsloth",
            why="its reference is loaded, and its callback made, while the trainer is built",
            fix="build it with sync_ref_model=True, ref_model_mixup_alpha and ref_model_sync_steps, and leave "
            "reference unset",
        ),
    ]
