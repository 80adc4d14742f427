"""The KL before the first update: it should be 0, and where it is not, something is not what it seems."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from klamp.diagnostics.alarms_kl import STEP_ZERO

STEP_ZERO_KL = STEP_ZERO.value
"""KL in nats per token above which a policy that has not been updated and its reference are not the same model."""


def step_zero_text(kl: float, reasons: Sequence[str]) -> str:
    """The warning for a KL (nats per token) before the first update that is not about 0."""
    likely = "; ".join(reasons) or "a reference that is another model, other kernels, or a mask that covers the prompt"
    return (
        f"The KL before the first update is {kl:.2e} nats per token and should be about 0: policy and reference differ "
        f"already. Likely reason: {likely}."
    )


def likely_reasons(policy: nn.Module, reference: nn.Module | None, *, adapter: bool, loaded: bool = True) -> list[str]:
    """What usually makes policy and reference differ before the first update, as far as it can be seen.

    Args:
        policy: the model that is trained.
        reference: the model with the reference's weights; None: the policy with its adapter off.
        adapter: whether the policy has a PEFT adapter.
        loaded: whether the reference's weights were loaded, and not copied from the policy.
    """
    dropping = [m for m in policy.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    found: list[str] = []
    if dropping and policy.training:
        found.append(f"dropout ({len(dropping)} layers with p > 0); set disable_dropout=True, or lora_dropout=0")
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
