"""What a TRL trainer's KL will really do, read back from the trainer itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klamp.config import TRL_LOSS_TYPES, KLConfig
from klamp.config.describe import DIVERGENCES, PLACEMENTS, describe_average, describe_clip, describe_price
from klamp.core.term import Placement
from klamp.core.types import Reduction
from klamp.hosts.common.control import NEVER_ZERO
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.versions import check_version
from klamp.hosts.trl.grpo_config import liger_bypasses, reward_scale
from klamp.hosts.trl.measure import group_size, price_in
from klamp.hosts.trl.reference import describe_reference
from klamp.hosts.trl.teacher import effective_term


def read_effective(
    trainer: Any, *, host: str = "TRL", loss_types: Mapping[str, Reduction | None] = TRL_LOSS_TYPES
) -> Effective:
    """See `klamp.trl.effective`; `host` is whose loss the trainer has."""
    session = getattr(trainer, "_klamp", None)
    kl = None if session is None else session.kl
    term = _stock(trainer, host, loss_types) if kl is None else _klamp(trainer, kl, loss_types)
    return Effective(
        host=f"trl {check_version('trl')}, {type(trainer).__name__}",
        terms=tuple(each for each in (term, effective_term(trainer)) if each is not None),
        normalizer=f"{_average(trainer.loss_type, loss_types)} ({host}'s own, loss_type={trainer.loss_type!r})",
        reference=describe_reference(trainer, getattr(session, "reference", "") or f"loaded by {host}"),
        notes=_notes(trainer, kl, host, loss_types),
    )


def _average(loss_type: str, loss_types: Mapping[str, Reduction | None]) -> str:
    if loss_type not in loss_types:
        return "unknown"
    reduction = loss_types[loss_type]
    return describe_average("token_mean", over="each micro-batch") if reduction is None else describe_average(reduction)


def _price(trainer: Any, beta: float, placement: Placement, loss_types: Mapping[str, Reduction | None]) -> str:
    if trainer.loss_type not in loss_types:
        return f"unknown: nothing is known of loss_type={trainer.loss_type!r}"
    scale = reward_scale(trainer.args)
    each = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize"
    if scale != "none" and each:
        return "unknown: each reward function is divided by a standard deviation of its own"
    price = price_in(trainer, beta, placement)
    return describe_price(price, group_size=group_size(trainer), of_batch=scale == "batch")


def _klamp(trainer: Any, kl: KLConfig, loss_types: Mapping[str, Reduction | None]) -> EffectiveTerm | None:
    control = trainer._klamp.control
    if not kl.needs_reference:
        return None
    clip = describe_clip(kl, length=control.reference_length)
    if kl.use_per_token_kl_threshold and control.reference_length is None and kl.kl_clip_method != "none":
        clip += " (the data's column, or measured at the start)"
    beta = control.beta(trainer.state.global_step, max(trainer.state.max_steps, 1))
    return EffectiveTerm.of(kl, beta=beta, price=_price(trainer, beta, kl.kl_placement, loss_types), clip=clip)


def _stock(trainer: Any, host: str, loss_types: Mapping[str, Reduction | None]) -> EffectiveTerm | None:
    if trainer.beta == 0:
        return None
    weighted = bool(getattr(trainer.args, "use_bias_correction_kl", False))
    return EffectiveTerm(
        term=f"{host}'s own",
        beta=float(trainer.beta),
        price=_price(trainer, float(trainer.beta), "loss", loss_types),
        controller="fixed",
        value="k3 times the policy ratio" if weighted else "k3",
        gradient="reverse, on-policy that of k2 (ratio not detached)"
        if weighted
        else f"forward: {DIVERGENCES['forward']}",
        placement=PLACEMENTS["loss"],
    )


def _notes(trainer: Any, kl: KLConfig | None, host: str, loss_types: Mapping[str, Reduction | None]) -> tuple[str, ...]:
    args, used, fast = trainer.args, trainer.beta != 0, getattr(getattr(trainer, "_klamp", None), "fast", None)
    liger = getattr(args, "use_liger_kernel", False) and liger_bypasses()
    split = loss_types.get(trainer.loss_type, "unknown") is None
    return that_apply([
        (used and kl is None and trainer.importance_sampling_level == "sequence", f"{host} broadcasts the sequence's "
         "ratio onto every token's KL: its gradient is then that of no divergence"),
        (used and kl is None and liger, "the loss, KL included, is computed in Liger's kernel"),
        (used and args.sync_ref_model, f"the reference moves, and checkpoints of {host} do not hold it: on resume it "
         "starts from where it was loaded"),
        (used and split, "each micro-batch is divided by its own tokens, so that the KL depends on how the batch is "
         "split"),
        (fast is not None, str(fast)),
        (0 < trainer.beta <= NEVER_ZERO, f"beta is 0 for the loss; {host} sees the smallest number so that it scores "
         "the reference"),
    ])  # fmt: skip
