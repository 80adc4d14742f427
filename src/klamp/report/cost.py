"""What costs the most KL over a whole run: which words, which positions, which prompts, and in which completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from klamp.report.choice import Shown
from klamp.report.position import BINS, k3

Read = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one completion adds to a cost."""

    shown: int
    """The number of the completion."""
    k3: float
    """Its part, in nats; twins count each."""
    position: int
    """The position of its token with the largest part."""
    largest: float
    """The part of that token, in nats, in one of the twins."""


@dataclass(kw_only=True)
class Cost:
    """What one word, position or prompt costs, over all completions that were written."""

    label: str
    """The word, the positions, or the prompt."""
    k3: float = 0.0
    """The sum of k3 over its tokens, in nats."""
    times: int = 0
    """How often it occurs."""
    shares: list[Share] = field(default_factory=list)
    """What each completion adds, the largest first."""

    @property
    def mean(self) -> float:
        """The mean of k3 over its occurrences, in nats."""
        return self.k3 / self.times if self.times else 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the completions of a page cost, thrice divided."""

    total: float
    """The sum of k3 over all tokens, in nats."""
    words: Sequence[Cost]
    """By word, the costliest first."""
    positions: Sequence[Cost]
    """By position among the tokens that the model wrote, the costliest first."""
    prompts: Sequence[Cost]
    """By prompt, the costliest first; an occurrence is a completion."""


def costs_of(completions: Sequence[Shown], readers: Sequence[Read], *, most: int) -> Costs:
    """The costs of all completions that a reference has scored.

    Args:
        completions: as `ranked` gives them.
        readers: of each run: turns its tokens into text.
        most: words, positions and prompts to keep.
    """
    known = [(number, each) for number, each in enumerate(completions) if each.against == "reference"]
    longest = max((sum(each.completion.is_sampled) for _, each in known), default=0)
    width = math.ceil(longest / BINS) or 1
    words, positions, prompts = _Tally(), _Tally(), _Tally()
    for number, each in known:
        parts = {i: k3(ratio) for i, ratio in enumerate(each.ratios) if math.isfinite(ratio)}
        read = readers[each.run]
        for word, inside in words_of([read(str(token)) for token in each.completion.tokens]):
            words.add(word, number, each.times, {i: parts[i] for i in inside if i in parts})
        begin = next((i for i, sampled in enumerate(each.completion.is_sampled) if sampled), 0)
        for i, part in parts.items():
            positions.add(_stretch(i - begin, width), number, each.times, {i: part})
        prompts.add(each.completion.prompt or each.completion.group, number, each.times, parts)
    return Costs(
        total=sum(each.k3 for each in prompts.found.values()),
        words=words.costliest(most),
        positions=positions.costliest(most),
        prompts=[each for each in prompts.costliest(most) if each.label],
    )


def words_of(texts: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """The words of a completion, each with the positions of its tokens; a letter after a letter continues a word.

    Args:
        texts: its tokens.
    """
    inside: list[int] = []
    for i, text in enumerate(texts):
        if inside and not (texts[i - 1][-1:].isalpha() and text[:1].isalpha()):
            yield _word(texts, inside), inside
            inside = []
        inside = [*inside, i]
    if inside:
        yield _word(texts, inside), inside


def _word(texts: Sequence[str], inside: Iterable[int]) -> str:
    text = "".join(texts[i] for i in inside)
    return text.strip() or text


def _stretch(place: int, width: int) -> str:
    first = place // width * width + 1
    return str(first) if width == 1 else f"{first}–{first + width - 1}"


class _Tally:
    def __init__(self) -> None:
        self.found: dict[str, Cost] = {}

    def add(self, label: str, number: int, times: int, parts: dict[int, float]) -> None:
        """Count what some tokens of a completion cost, if any has a number."""
        if not parts:
            return
        cost = self.found.setdefault(label, Cost(label=label))
        part = times * sum(parts.values())
        cost.k3, cost.times = cost.k3 + part, cost.times + times
        worst = max(parts, key=lambda i: parts[i])
        before = cost.shares.pop() if cost.shares and cost.shares[-1].shown == number else None
        if before is not None and before.largest >= parts[worst]:
            worst, largest = before.position, before.largest
        else:
            largest = parts[worst]
        part += 0.0 if before is None else before.k3
        cost.shares.append(Share(shown=number, k3=part, position=worst, largest=largest))

    def costliest(self, most: int) -> list[Cost]:
        """The costliest labels, with their costliest completions first."""
        found = sorted((cost for cost in self.found.values() if cost.k3 > 0), key=lambda cost: -cost.k3)[:most]
        for cost in found:
            cost.shares.sort(key=lambda share: -share.k3)
        return found
