"""What the KL of a call of klamp.tinker's loss will really do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Unpack

from klamp.config import KLConfig
from klamp.config.describe import describe_average, describe_clip, describe_price
from klamp.config.loss import price_of
from klamp.core.objective import Objective
from klamp.core.types import Reduction
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.tinker.options import (
    KL_COEF,
    LossOptions,
    Normalizer,
    make_settings,
    merge_coefficients,
    reference_length_of,
)

OF_THE_DATUMS = "ref_logprobs of the datums, whoever computed them (compute_reference_logprobs)"
UNREAD = (
    "kl_early_stop",
    "kl_lr_guard",
    "reference",
    "reference_decay",
    "reference_device",
    "reference_dtype",
    "reference_name",
    "reference_reset_steps",
    "reference_share",
    "reference_url",
)
"""Fields of `KLConfig` that no call of the loss looks at."""


def effective(
    kl_coef: float = KL_COEF,
    cliprange: float | tuple[float, float] = 0.2,
    kl: KLConfig | None = None,
    **options: Unpack[LossOptions],
) -> Effective:
    """What the KL of a call with these arguments will really do, in words; needs neither datums nor the SDK.

    Args:
        kl_coef: see `compute_grpo_kl_loss`.
        cliprange: see there.
        kl: see there.
        options: those of the call, see `LossOptions`.

    Raises:
        UnknownNameError, ConfigError: arguments that the call would refuse.
    """
    objective = make_settings(kl_coef, cliprange, kl, **options).objective
    beta = objective.beta
    kl = merge_coefficients(kl_coef, kl)
    length = reference_length_of(kl, options.get("reference_length"))
    term = EffectiveTerm.of(
        kl,
        beta=beta,
        price=_price(objective),
        controller="fixed" if options.get("beta") is None else "the caller's: each call is passed its beta",
        clip=describe_clip(kl, length="the datum's reference_length" if isinstance(length, Sequence) else length),
    )
    return Effective(
        host=_host(),
        terms=(term,) if beta > 0 else (),
        normalizer=_average(options),
        reference=OF_THE_DATUMS if beta > 0 else "none is read: the coefficient is 0",
        notes=_notes(kl, options) if beta > 0 else (),
    )


def _host() -> str:
    try:
        return f"tinker {metadata.version('tinker')}, forward_backward_custom"
    except metadata.PackageNotFoundError:
        return "tinker, not installed here"


def _price(objective: Objective) -> str:
    """The price where a call alone tells it; its advantages are the caller's."""
    term = objective.kl
    price = price_of(objective.beta, placement=term.placement, baseline="leave_one_out", scale="none", group_size=2)
    text = describe_price(price, group_size=2)
    if term.placement == "reward":
        return text
    if term.placement == "loss" and term.normalizer not in (None, objective.reduction):
        return "unknown: the KL has an average of its own, and the caller forms the advantages"
    return f"{text}, if advantages are rewards less the mean of the others; for any other it is unknown here"


def _average(options: LossOptions) -> str:
    normalizer: Normalizer = options.get("normalizer", "token_mean")
    over = "the call" if options.get("totals") is None else "the step that totals= describes"
    if normalizer == "token_sum":
        return "sum over the tokens of the call (normalizer='token_sum')"
    return f"{_in_words(normalizer, options, over)} (normalizer={normalizer!r})"


def _in_words(reduction: Reduction, options: LossOptions, over: str) -> str:
    length = options.get("max_length")
    return describe_average(reduction, over=over, length="max_length" if length is None else str(length))


def _notes(kl: KLConfig, options: LossOptions) -> tuple[str, ...]:
    moves = kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    unread = [name for name in UNREAD if getattr(kl, name) != getattr(KLConfig, name)]
    own = kl.kl_normalizer
    return that_apply([
        (moves and options.get("beta") is None, "a call keeps no state: nothing moves beta, unless the caller passes "
         "beta=controller.value, with controller = kl.build_controller()"),
        (kl.kl_placement == "reward", "the loss adds nothing: penalize_rewards takes the KL from the rewards, before "
         "advantages that are not divided by the group's standard deviation"),
        (kl.kl_placement == "advantage", "the KL is the sampler's: datums go in as they were, not through "
         "shift_advantages as well"),
        (kl.kl_placement == "loss" and own is not None, f"the KL has an average of its own (kl_normalizer={own!r})"),
        (kl.kl_clip_method != "none" and options.get("group_size") is None, "the clip is gated on groups: without "
         "group_size the call is refused"),
        (kl.excludes, "which tokens carry no KL is what kl_mask of the datums says: build_datum(kl_mask=...)"),
        (bool(unread), f"without effect here: {', '.join(unread)}"),
    ])  # fmt: skip
