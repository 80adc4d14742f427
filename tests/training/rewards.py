"""Rewards for the tests: they vary on random text, and one of them breaks when it is told to."""

from typing import Any

STATE: dict[str, float] = {"calls": 0, "break_at": -1, "pay": 0.0}
"""Calls of `breaks` so far, and the call at which it raises; what `seven` pays for length."""


def digits(completion: str, **_: Any) -> float:
    return sum(c.isdigit() for c in completion) / 6


def short(completion: str, **_: Any) -> float:
    return -float(len(completion))


def sevens(completion: str, **_: Any) -> float:
    return min(completion.count("7"), 8) / 8


def hundred(completion: str, **_: Any) -> float:
    return 100 * digits(completion)


def nearly_equal(completion: str, **_: Any) -> float:
    """1, and a hundred-thousandth for every character."""
    return 1 + 1e-5 * len(completion)


def constant(completion: str, **_: Any) -> float:
    return 1.0


def breaks(completion: str, **fields: Any) -> float:
    """`digits`, until the call that was asked for."""
    STATE["calls"] += 1
    if STATE["calls"] == STATE["break_at"]:
        raise RuntimeError("the judge is out to lunch")
    return digits(completion, **fields)


def not_a_number(completion: str, **fields: Any) -> float:
    """`digits`, and NaN from the call that was asked for."""
    STATE["calls"] += 1
    return float("nan") if STATE["calls"] == STATE["break_at"] else digits(completion, **fields)


def seven(completion: str, **_: Any) -> float:
    """1 for a first character that is a 7, and where that is earned what is paid for every character after it."""
    return float(completion.startswith("7")) * (1 + STATE["pay"] * sum(c != "7" for c in completion))


def odd(completion: str, **_: Any) -> float:
    return float(completion[:1] in set("13579"))


def half(completion: str, *, answer: str) -> float:
    """`digits` for every other answer; the groups of the others are saturated."""
    return digits(completion) if sum(map(ord, str(answer))) % 2 else 1.0
