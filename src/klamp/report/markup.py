"""HTML in which every text is escaped: a model's text may hold markup, control characters, direction marks."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable
from typing import Any, TypeAlias

Attribute: TypeAlias = str | float | bool | None

VOID = ("meta", "input", "link", "br")
UNSEEN = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols that show nothing; those that Unicode calls controls or formats are found by their category."""
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
KEPT = "\n\t"
MARKS = 4
"""Combining marks that a letter keeps; a heap of them would be drawn over the lines above and below."""


class Html(str):
    """A text that is HTML already and needs no escaping."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """An HTML element; texts in it (anything but `Html`) and its attributes are escaped.

    Args:
        name: of the element.
        children: text or markup, in order.
        attributes: `class_` is class, `aria_label` is aria-label; None and False are left out, True stands bare.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = key.rstrip("_").replace("_", "-")
        words.append(spelled if value is True else f'{spelled}="{escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Html:
    """HTML and texts, one after the other; texts are escaped."""
    return Html(escape(between).join(escape(part) for part in parts))


def escape(text: str) -> Html:
    """A text as HTML, with invisible characters made visible; `Html` is left as it is."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text), quote=True))


def visible(text: str) -> str:
    """The text with each invisible or direction-changing character replaced by its number."""
    if text.isascii() and text.isprintable():
        return text
    found: list[str] = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > MARKS:
            continue
        hidden = (category in HIDDEN and character not in KEPT) or character in UNSEEN
        found.append(f"⟨U+{ord(character):04X}⟩" if hidden else character)
    return "".join(found)


def shorten(text: str, length: int) -> str:
    """The beginning of a text, and how many characters were left out.

    Args:
        text: the text.
        length: characters to keep.
    """
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} more characters)"


def json_block(value: Any, *, name: str) -> Html:
    """Data for the script of the page, in an element that no text in the data can close.

    Args:
        value: what JSON takes; no NaN.
        name: id of the element.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')
