"""What two KL terms do differently: their explanations side by side, and what is the same in both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from klamp.verify.explain import Explanation, Line

PRICE = "price: "
"""How the number begins that says what a nat costs."""
EQUAL = 1e-6
"""Relative difference up to which two measured numbers are the same."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two KL terms, ready to be printed."""

    names: tuple[str, str]
    """What was compared."""
    verdict: str
    """The difference, in a sentence or two."""
    words: tuple[tuple[str, str, str], ...]
    """Label, what is said of the first, what of the second; only where that differs."""
    numbers: tuple[tuple[str, float | None, float | None], ...]
    """What was measured, with its unit in words; of the first, of the second; None: there is no such number."""
    same: tuple[str, ...]
    """The labels under which both say the same."""
    cautions: tuple[tuple[str, str], ...]
    """The name of one of the two, and a caution that only this one has."""


def compare(first: Explanation, second: Explanation) -> Comparison:
    """Compares what two KL terms do, by what was measured of each.

    Args:
        first: the explanation of one.
        second: that of the other.
    """
    words = (_by_label(first.lines), _by_label(second.lines))
    labels = list(dict.fromkeys([*words[0], *words[1]]))
    texts = [(label, words[0].get(label, "-"), words[1].get(label, "-")) for label in labels]
    names = dict.fromkeys([*first.numbers, *second.numbers])
    numbers = [(name, first.numbers.get(name), second.numbers.get(name)) for name in names]
    return Comparison(
        names=(first.name, second.name),
        verdict=_verdict(first, second),
        words=tuple(each for each in texts if each[1] != each[2]),
        numbers=tuple(numbers),
        same=tuple(label for label, one, other in texts if one == other),
        cautions=(*_only_in(first, second), *_only_in(second, first)),
    )


def _by_label(lines: Iterable[Line]) -> dict[str, str]:
    """Label -> its text; lines without a label go on with the one before."""
    found: dict[str, str] = {}
    label = ""
    for name, text in lines:
        label = name or label
        found[label] = f"{found[label]}; {text}" if label in found else text
    return found


def _verdict(first: Explanation, second: Explanation) -> str:
    if first.verdict == second.verdict:
        pulls = f"Both do the same: {first.verdict}"
    else:
        pulls = f"{first.name}: {first.verdict} {second.name}: {second.verdict}"
    return " ".join(filter(None, (pulls, _prices(first, second))))


def _prices(first: Explanation, second: Explanation) -> str:
    """The sentence on what a nat costs in both; empty where one of them has no price."""
    (one, of_first), (other, of_second) = _price(first), _price(second)
    if not one or not other:
        return ""
    if one != other:
        return "Their prices are in different units: only one of them divides rewards by their group's deviation."
    if is_same(of_first, of_second):
        return "A nat costs the same in both."
    if not (of_first and of_second):
        return f"A nat costs {of_first:.3g} in {first.name}, {of_second:.3g} in {second.name}."
    dear, cheap = (second, first) if of_second > of_first else (first, second)
    times = max(of_first, of_second) / min(of_first, of_second)
    return f"A nat costs {times:.3g} times as much in {dear.name} as in {cheap.name}."


def _price(explanation: Explanation) -> tuple[str, float]:
    prices = [(name, value) for name, value in explanation.numbers.items() if name.startswith(PRICE)]
    return prices[0] if prices else ("", 0.0)


def is_same(one: float, other: float) -> bool:
    """Whether two measured numbers are equal, rounding aside."""
    return abs(one - other) <= EQUAL * max(abs(one), abs(other))


def _only_in(mine: Explanation, others: Explanation) -> list[tuple[str, str]]:
    return [(mine.name, text) for text in mine.cautions if text not in others.cautions]
