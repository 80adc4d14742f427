"""The KL before the first update, which should be 0, and after a resume, which should be what it was: else, why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from klamp.doctor.alarms_kl import REFERENCE_DIFFERS, STEP_ZERO

STEP_ZERO_KL = STEP_ZERO.value
"""KL in nats per token above which a policy that has not been updated and its reference are not the same model."""


def step_zero_text(kl: float, reasons: Sequence[str]) -> str:
    """The warning for a KL (nats per token) before the first update that is not about 0."""
    likely = "; ".join(reasons) or "a reference that is another model, other kernels, or a mask that covers the prompt"
    return (
        f"The KL before the first update is {kl:.2e} nats per token and should be about 0: policy and reference differ "
        f"already. Likely reason: {likely}."
    )


RESUMED = 10.0
"""How many times larger or smaller the KL of the first step after a resume must be to speak of another reference."""


def resumed_text(before: float, after: float) -> str:
    """The warning where the KL (nats per token) is another after a resume than in the step before; "" where not."""
    least = REFERENCE_DIFFERS.value  # a run's first steps multiply a KL below it
    if before <= max(least, RESUMED * after) and after <= RESUMED * max(least, before):
        return ""
    return (
        f"The KL is {after:.3g} nats per token in the first step after the resume, and was {before:.3g} in the last "
        "one before it. Most likely the reference is another model than it was, or the policy not that of the "
        "checkpoint. Resume with the model and the reference that the run was started with."
    )


class ActiveDropout(NamedTuple):
    """A dropout, or a noise of a router, that is above 0."""

    holder: Any
    """The layer or the settings that hold the number."""
    name: str
    """The attribute: `p` of an nn.Dropout, `attention_dropout`, `attn_pdrop`, ..."""


def active_dropouts(model: nn.Module) -> list[ActiveDropout]:
    """Every dropout of a model that is above 0: in an nn.Dropout, a number of a layer's own, or the settings."""
    found: dict[tuple[int, str], ActiveDropout] = {}
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if isinstance(value, float) and value > 0 and _is_dropout(holder, name):
                    found[id(holder), name] = ActiveDropout(holder, name)
    return list(found.values())


def _is_dropout(holder: object, name: str) -> bool:
    if isinstance(holder, nn.Dropout):
        return name == "p"
    return "drop" in name or name in ("jitter_noise", "input_jitter_noise")


def likely_reasons(policy: nn.Module, reference: nn.Module | None, *, adapter: bool, loaded: bool = True) -> list[str]:
    """What usually makes policy and reference (None: the policy with its adapter off) differ before the first update.

    `loaded`: the reference's weights were loaded, and not copied from the policy.
    """
    dropouts = active_dropouts(policy) if policy.training else []
    layers = [each for each in dropouts if isinstance(each.holder, nn.Dropout)]
    others = [each for each in dropouts if not isinstance(each.holder, nn.Dropout)]
    inside = sorted({each.name for each in others})
    found: list[str] = []
    if layers:
        found.append(f"dropout ({len(layers)} layers with p > 0); set disable_dropout=True, or lora_dropout=0")
    elif inside:
        found.append(
            f"dropout of a layer or in its settings ({', '.join(inside)} above 0), which disable_dropout does not "
            f"switch off; load the model with {inside[0]}=0.0"
        )
    if adapter and reference is None:
        found.append("an adapter that is not zero at the start, while the reference is the model without it")
    if reference is not None:
        mine, other = next(policy.parameters()).dtype, next(reference.parameters()).dtype
        if mine != other:
            found.append(f"data types: the policy is {mine}, the reference {other}")
        elif loaded and not adapter:
            found.append(
                "weights: the reference was loaded from a path or the Hub and the policy has been changed since; pass "
                "ref_model=copy.deepcopy(model)"
            )
    return found
