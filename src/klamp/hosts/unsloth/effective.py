"""What an Unsloth trainer's KL will really do, its silent clamps included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.hosts.trl.effective import Effective
from klamp.hosts.trl.patched import host_class
from klamp.hosts.unsloth.host import Clamps, check_version, loss_function, silent_clamps

GLOBAL = "mean over the tokens of the optimizer step, all processes"


def on_unsloth(trainer: Any, found: Effective) -> Effective:
    """What was read from a trainer of TRL's kind, corrected for one that Unsloth has rewritten."""
    host = host_class(type(trainer))
    assert host is not None
    beyond = getattr(trainer, "_klamp_beyond", None)
    clamps = silent_clamps(loss_function(host)[1]) if beyond is None else beyond.clamps
    average = found.normalizer.replace("TRL", "Unsloth")
    if trainer.loss_type == "bnpo":
        average = f"{GLOBAL} (Unsloth's own, loss_type='bnpo')"
    return replace(
        found,
        host=f"unsloth {check_version()}, {found.host}",
        term=found.term.replace("TRL", "Unsloth"),
        reference=found.reference.replace("TRL", "Unsloth"),
        normalizer=average,
        notes=(
            *(note.replace("TRL", "Unsloth") for note in found.notes if "each micro-batch" not in note),
            clamp_note(clamps, beyond, own=found.term.startswith("TRL")),
        ),
    )


def clamp_note(clamps: Clamps, beyond: Any, *, own: bool) -> str:
    """A sentence on where Unsloth's own KL silently stops pulling."""
    sides = [f"{side:+.2f}" for side in (clamps.below, clamps.above) if side is not None]
    if not sides:
        return "Unsloth's own KL has no clamp"
    says = (
        f"Unsloth's own k3 stops at {clamps.value:g} nats per token: past a log-ratio of {' and '.join(sides)} it has "
        "no gradient"
    )
    if own:
        return f"{says}, and nothing says so"
    seen = "" if beyond is None or not beyond.of else f"; {beyond.tokens} of {beyond.of} trained tokens were past them"
    return f"{says}; klamp's KL has none of these clamps{seen}"
