"""Writes values in Hydra's grammar, in which `=`, `,`, brackets and quotes have a meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping

PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.\-]*")
"""Texts that Hydra reads as they stand."""

WORDS = ("true", "false", "null", "nan", "inf")
"""Texts that Hydra takes for something else than a text."""


def written(value: object) -> str:
    """A value as the right side of an override: KEY=VALUE.

    Args:
        value: None, a bool, a number, a text, or a sequence or mapping of such.
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in WORDS else _quoted(value)
    if isinstance(value, tuple | list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(each)}" for name, each in value.items()) + "}"
    return repr(value)


def _quoted(text: str) -> str:
    """A text between quotes: a quote in it is escaped, and so are backslashes right before a quote or the end."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"
