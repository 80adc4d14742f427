"""Texts of the page: HTML in which every text is escaped, tables, numbers as people write them, tokens as text.

A model's text may hold markup, control characters, direction marks; vocabularies write spaces and bytes with letters of
their own.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

VOID = ("meta", "input", "link", "br")
UNSEEN = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols that show nothing; those that Unicode calls controls or formats are found by their category."""
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
KEPT = "\n\t"
MARKS = 4
"""Combining marks that a letter keeps; more would be drawn over the lines above and below."""
MISSING = "–"
MINUS = "−"
LONGEST = 80
"""The most characters of a token that are shown."""
BYTE_LEVEL = "ĠĊ"
"""A space and a line break in byte-level vocabularies (GPT-2 and its heirs)."""
Attribute: TypeAlias = str | float | bool | None


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
    """A text as HTML, with invisible characters made visible; `Html` is returned unchanged."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text), quote=True))


def visible(text: str) -> str:
    """The text with each invisible or direction-changing character replaced by its number."""
    if text.isascii() and text.isprintable():
        return text
    letters: list[str] = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > MARKS:
            continue
        hidden = (category in HIDDEN and character not in KEPT) or character in UNSEEN
        letters.append(f"⟨U+{ord(character):04X}⟩" if hidden else character)
    return "".join(letters)


def shorten(text: str, length: int) -> str:
    """The beginning of a text, and how many characters were left out."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} more characters)"


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, classes: str = "") -> Html:
    """A table that scrolls if it is wider than the page; the first cell of each row is its heading."""
    head = element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    table = element(
        "table",
        element("caption", caption, class_=None if classes == "numbers" else "unseen"),
        head,
        element("tbody", *body),
        class_=classes or None,
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {caption}")


def short(value: float | None, *, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent where people would write none."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else f"{MINUS}∞")
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-4 <= size < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{size:.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, _, exponent = f"{size:.{max(0, digits - 1)}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{exponent[0].replace('+', '').replace('-', MINUS)}{int(exponent[1:])}"
    return f"{MINUS}{text}" if value < 0 else text


def rounded(value: float | None, *, decimals: int | None, digits: int = 4) -> str:
    """A number with so many decimals or, if None, so many significant digits."""
    if decimals is None or value is None or not math.isfinite(value):
        return short(value, digits=digits)
    return f"{value:.{decimals}f}".replace("-", MINUS)


def signed(value: float, *, digits: int = 3) -> str:
    """A number with its sign, + included."""
    return short(value, digits=digits) if value <= 0 else f"+{short(value, digits=digits)}"


def probability(logprob: float | None) -> str:
    """The probability exp(logprob), in percent."""
    if logprob is None or not math.isfinite(logprob):
        return MISSING
    percent = 100 * math.exp(min(logprob, 0.0))
    if percent >= 99.95:
        return f"{percent:.3f} %" if percent < 99.9995 else "100 %"
    return f"{percent:.1f} %" if percent >= 0.1 else f"{short(percent, digits=2)} %"


def count(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def setting(value: object) -> str:
    """The value of a setting, as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(setting(item) for item in value) or "(empty)"
    return str(value) or "(empty)"


Read = Callable[[str], str]


def reader(tokens: Iterable[str]) -> Read:
    """The function that turns tokens of one run into text: byte-level ones are decoded, `▁` becomes a space."""
    if any(token.startswith(tuple(BYTE_LEVEL)) for token in tokens):
        return decoded
    return lambda token: token.replace("▁", " ")


@cache
def _bytes() -> dict[str, int]:
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
    """A token for the page: without invisible characters, and not too long."""
    if len(text) > longest:
        text = f"{text[:longest]}…(+{len(text) - longest})"
    if not text:
        return "∅"
    if not text.strip(" "):
        return "␣" * len(text)
    return visible(text.replace("\r", "␍").replace("\t", "⇥").replace("\n", "↵\n"))
