"""What an Unsloth trainer's KL will really do, its silent clamps included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.hosts.common.effective import Effective
from klamp.hosts.trl.effective import read_effective
from klamp.hosts.trl.patched import host_class
from klamp.hosts.unsloth.host import Clamps, check_version, loss_function, silent_clamps
from klamp.hosts.unsloth.refusals import LOSS_TYPES


def read_effective_on_unsloth(trainer: Any) -> Effective:
    """What the KL of a trainer that Unsloth has rewritten will really do; see `klamp.trl.effective`."""
    host = host_class(type(trainer))
    assert host is not None
    found = read_effective(trainer, host="Unsloth", loss_types=LOSS_TYPES)
    beyond = getattr(trainer, "_klamp_beyond", None)
    clamps = silent_clamps(loss_function(host)[1]) if beyond is None else beyond.clamps
    note = clamp_note(clamps, beyond, own=any(term.term == "Unsloth's own" for term in found.terms))
    return replace(found, host=f"unsloth {check_version()}, {found.host}", notes=(*found.notes, note))


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
