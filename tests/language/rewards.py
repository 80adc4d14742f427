"""A reward with a spread in every group, as few real texts are equally long."""

from __future__ import annotations

from typing import Any


def brief(completion: str, **_: Any) -> float:
    """Minus the length, in hundreds of characters."""
    return -len(completion) / 100
