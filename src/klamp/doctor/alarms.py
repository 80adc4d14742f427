"""All alarms, from the modules that define them with `@alarm`."""

from __future__ import annotations

from collections.abc import Iterable

from klamp.doctor import alarms_kl, alarms_run, alarms_tokens
from klamp.doctor.alarm import ALARMS
from klamp.errors import check_name

__all__ = ["ALARMS", "alarms_kl", "alarms_run", "alarms_tokens", "check_names"]


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no alarm has, with an UnknownNameError that names the nearest."""
    for name in names:
        check_name("alarm", name, ALARMS)
