"""Tokens as text: vocabularies spell spaces and bytes in letters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from klamp.report.markup import visible

LONGEST = 80
"""Characters of a token that are shown."""
BYTE_LEVEL = "ĠĊ"
"""A space and a line break in byte-level vocabularies (GPT-2 and its heirs)."""


def reader(tokens: Iterable[str]) -> Callable[[str], str]:
    """How to read the tokens of one run: byte-level ones are decoded, `▁` is a space, the rest is as it is.

    Args:
        tokens: some of them.
    """
    if any(token.startswith(tuple(BYTE_LEVEL)) for token in tokens):
        return decoded
    return lambda token: token.replace("▁", " ")


@cache
def _bytes() -> dict[str, int]:
    """Letter -> byte: printable bytes stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def decoded(token: str) -> str:
    """A byte-level token as text; bytes that are a part of a letter only are written as numbers."""
    table = _bytes()
    if any(letter not in table for letter in token):
        return token
    return bytes(table[letter] for letter in token).decode("utf-8", "backslashreplace")


def shown(text: str, *, longest: int = LONGEST) -> str:
    """A token's text as it stands among others: nothing in it is invisible, and it is not too long.

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
