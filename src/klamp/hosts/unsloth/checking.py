"""`klamp.trl.check` on a trainer of Unsloth's: its log-probabilities are an argument of Unsloth's loss function."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from klamp.errors import UnsupportedVersion
from klamp.hosts.trl.checking import Listener
from klamp.hosts.trl.grpo_config import host_class
from klamp.hosts.unsloth.loss_function import LOSS, Call, loss_function


def listen(listener: Listener) -> None:
    """Keep the arguments of Unsloth's loss function; if klamp does not know it, the verdict is "cannot tell"."""
    if (host := host_class(type(listener.trainer))) is None:
        return
    with suppress(UnsupportedVersion):
        names, original = loss_function(host)

        def apply(*given: Any) -> Any:
            listener.calls.append(Call(*given))
            return original.apply(*given)

        listener.put(names, LOSS, SimpleNamespace(apply=apply, forward=original.forward))


Listener.others.append(listen)
