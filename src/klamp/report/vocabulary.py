"""Tokens as text: vocabularies write spaces and bytes with letters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache

from klamp.report.markup import visible

Read = Callable[[str], str]
"""Turns a token of a run into text."""

LONGEST = 80
"""The most characters of a token that are shown."""
BYTE_LEVEL = "ĠĊ"
"""A space and a line break in byte-level vocabularies (GPT-2 and its heirs)."""


def reader(tokens: Iterable[str]) -> Read:
    """The function that turns tokens of one run into text: byte-level ones are decoded, `▁` becomes a space.

    Args:
        tokens: some of them.
    """
    if any(token.startswith(tuple(BYTE_LEVEL)) for token in tokens):
        return decoded
    return lambda token: token.replace("▁", " ")


@cache
def _bytes() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=2**18)
def decoded(token: str) -> str:
    """A byte-level token as text; a byte that is only a part of a character is written as a number."""
    table = _bytes()
    if any(letter not in table for letter in token):
        return token
    return bytes(table[letter] for letter in token).decode("utf-8", "backslashreplace")


def shown(text: str, *, longest: int = LONGEST) -> str:
    """A token as it is written on the page: nothing invisible in it, and not too long.

    Args:
        text: as `reader` gives it.
        longest: characters to keep.
    """
    if len(text) > longest:
        text = f"{text[:longest]}…(+{len(text) - longest})"
    if not text:
        return "∅"
    if not text.strip(" "):
        return "␣" * len(text)
    return visible(text.replace("\r", "␍").replace("\t", "⇥").replace("\n", "↵\n"))
