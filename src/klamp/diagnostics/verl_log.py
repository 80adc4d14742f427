"""The lines of verl's file logger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def is_verl_line(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of verl's file logger: a step and its data."""
    return "step" in line and isinstance(line.get("data"), dict)


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of verl's file logger as one row: its data, with the step; null is a NaN, which JSON cannot hold.

    Args:
        line: as it was read; a line of another kind is returned as it is.
    """
    if not is_verl_line(line):
        return dict(line)
    found: dict[str, Any] = {}
    for name, value in line["data"].items():
        found |= {f"{name}/{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
    lost = {name: math.nan for name, value in found.items() if value is None}
    return found | lost | {"step": line["step"]}
