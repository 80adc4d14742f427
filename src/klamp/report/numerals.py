"""Numbers as people write them."""

from __future__ import annotations

import math

MISSING = "–"
MINUS = "−"


def short(value: float | None, *, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent where people would write none.

    Args:
        value: the number; None: there is none.
        digits: significant digits.
    """
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
    """A number with so many decimals, or, where there is no rule for them, with so many significant digits.

    Args:
        value: the number; None: there is none.
        decimals: that all numbers of its kind have; None: see `digits`.
        digits: as in `short`.
    """
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
        return ", ".join(setting(each) for each in value) or "(empty)"
    return str(value) or "(empty)"
