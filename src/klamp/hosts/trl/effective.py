"""What a TRL trainer's KL will really do, read back from the trainer itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from klamp.config import KLConfig
from klamp.hosts.common.control import NEVER_ZERO
from klamp.hosts.common.words import in_lines
from klamp.hosts.trl.refusals import liger_bypasses
from klamp.hosts.trl.versions import check_version

_NORMALISERS = {
    "grpo": "mean over completions of the mean over tokens",
    "sapo": "mean over completions of the mean over tokens",
    "bnpo": "mean over the tokens of each micro-batch",
    "dr_grpo": "sum over tokens / (completions * max_completion_length)",
    "dapo": "mean over the tokens of the optimizer step, all processes",
    "cispo": "mean over the tokens of the optimizer step, all processes",
    "vespo": "mean over the tokens of the optimizer step, all processes",
    "luspo": "mean over completions of the sum over tokens",
}


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The KL of a trainer, in words; `str` gives one line per field."""

    host: str
    """TRL and its version."""
    term: str
    """Whose KL it is: klamp's, TRL's own, or none."""
    beta: float
    """The coefficient in force now."""
    controller: str
    """How the coefficient moves."""
    value: str
    """What the KL's value is."""
    gradient: str
    """Whose gradient it has."""
    placement: str
    """Where it enters."""
    clip: str
    """Its budget, if any."""
    normalizer: str
    """How tokens become one number."""
    reference: str
    """Where the reference comes from."""
    notes: tuple[str, ...] = ()
    """What may surprise."""

    def __str__(self) -> str:
        return in_lines(self)


def read_effective(trainer: Any) -> Effective:
    """What the KL of a TRL trainer will really do: klamp's, an attached one, or a stock trainer.

    Read from the trainer, not from what it was asked for. Changes nothing.
    """
    session = getattr(trainer, "_klamp", None)
    kl = None if session is None else session.kl
    words = _stock(trainer) if kl is None else _klamp(trainer, kl)
    return Effective(
        host=f"trl {check_version()}, {type(trainer).__name__}",
        normalizer=f"{_NORMALISERS.get(trainer.loss_type, 'unknown')} (TRL's own, loss_type={trainer.loss_type!r})",
        reference=_reference(trainer) if session is None or not session.reference else session.reference,
        notes=tuple(_notes(trainer, kl)),
        **words,
    )


def _klamp(trainer: Any, kl: KLConfig) -> dict[str, Any]:
    control = trainer._klamp.control
    gate = f"{kl.kl_clip_method}, {kl.kl_clip_threshold:g} nats"
    per_token = f" per token; reference length: {_length(control)}"
    adaptive = kl.controller_name if kl.target_kl is None else f"{kl.controller_name}, target {kl.target_kl:g}"
    return {
        "term": "klamp's" if kl.needs_reference else "none: beta is 0",
        "beta": control.beta(trainer.state.global_step, max(trainer.state.max_steps, 1)),
        "controller": adaptive + ("" if kl.kl_schedule == "constant" else f", schedule {kl.kl_schedule}"),
        "value": kl.kl_estimator,
        "gradient": f"{kl.kl_gradient}, horizon {kl.kl_horizon}, off-policy weights: {kl.kl_off_policy}",
        "placement": kl.kl_placement,
        "clip": "none" if kl.kl_clip_method == "none" else gate + (per_token if kl.use_per_token_kl_threshold else ""),
    }


def _length(control: Any) -> str:
    known = control.reference_length
    return "the data's column, or measured at the start" if known is None else f"{known:g} tokens"


def _stock(trainer: Any) -> dict[str, Any]:
    weighted = bool(getattr(trainer.args, "use_bias_correction_kl", False))
    beta = float(trainer.beta)
    return {
        "term": "TRL's own" if beta else "none: beta is 0",
        "beta": beta,
        "controller": "fixed",
        "value": "k3 times the policy ratio" if weighted else "k3",
        "gradient": "reverse, on-policy that of k2 (ratio not detached)" if weighted else "forward: KL(ref||policy)",
        "placement": "loss",
        "clip": "none",
    }


def _reference(trainer: Any) -> str:
    if trainer.beta == 0:
        return "none: beta is 0"
    return "the policy with its adapter off" if trainer.ref_model is None else "loaded by TRL"


def _notes(trainer: Any, kl: KLConfig | None) -> list[str]:
    args, used = trainer.args, trainer.beta != 0
    liger = getattr(args, "use_liger_kernel", False) and liger_bypasses()
    rows = [
        (used and kl is None and trainer.importance_sampling_level == "sequence", "TRL broadcasts the sequence's ratio "
         "onto every token's KL: its gradient is then that of no divergence"),
        (used and kl is None and liger, "the loss, KL included, is computed in Liger's kernel"),
        (used and args.sync_ref_model, "the reference moves, and checkpoints of TRL do not hold it: on resume it "
         "starts from where it was loaded"),
        (used and trainer.loss_type == "bnpo", "each micro-batch is divided by its own tokens, so that the KL depends "
         "on how the batch is split"),
        (0 < trainer.beta <= NEVER_ZERO, "beta is 0 for the loss; TRL sees the smallest number so that it scores the "
         "reference"),
    ]  # fmt: skip
    return [text for applies, text in rows if applies]
