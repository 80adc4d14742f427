"""What `effective` found, as text."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def in_lines(found: Any) -> str:
    """A line per field of a dataclass, then one per note.

    Args:
        found: whose field `notes` is a tuple of sentences.
    """
    rows = [(f.name, getattr(found, f.name)) for f in fields(found) if f.name != "notes"]
    return "\n".join([*(f"{name:11}{value}" for name, value in rows), *(f"note       {note}" for note in found.notes)])
