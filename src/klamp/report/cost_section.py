"""What costs the most KL over a whole run: which words and which prompts, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.diagnostics.alarms_tokens import k3
from klamp.report.completions import Shown
from klamp.report.text import Html, Read, element, join, plain_table, short, shown

ROWS = 10
"""The most words and prompts."""
WORD, PROMPT = 24, 90
"""Characters of a word and of a prompt in the tables."""

Kind: TypeAlias = Literal["word", "prompt"]
KINDS: tuple[Kind, ...] = ("word", "prompt")
"""How a cost is divided; by position, the page has charts."""


@dataclass(kw_only=True, slots=True)
class Cost:
    """What one word or prompt costs, over all completions that were written."""

    label: str
    """The word or the prompt."""
    k3: float = 0.0
    """The sum of k3 over its tokens, in nats."""
    times: int = 0
    """How often it occurs; of a prompt, in completions."""

    @property
    def mean(self) -> float:
        """The mean of k3 over its occurrences, in nats."""
        return self.k3 / self.times if self.times else 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What all completions that were written cost, divided in two ways."""

    total: float
    """The sum of k3 over all tokens, in nats."""
    by: Mapping[Kind, Sequence[Cost]]
    """The costliest words and prompts, the costliest first."""


def costs_of(completions: Sequence[Shown], readers: Sequence[Read], *, most: int = ROWS) -> Costs:
    """The costs of all completions that a reference has scored.

    Args:
        completions: as `ranked` gives them.
        readers: of each run: turns its tokens into text.
        most: words and prompts to keep.
    """
    found: dict[Kind, dict[str, Cost]] = {kind: {} for kind in KINDS}
    for each in completions:
        for kind, label, part in _divided(each, readers[each.run]) if each.against == "reference" else ():
            cost = found[kind].setdefault(label, Cost(label=label))
            cost.k3 += each.times * part
            cost.times += each.times
    total = sum(cost.k3 for cost in found["prompt"].values())
    ordered = {kind: sorted(found[kind].values(), key=lambda cost: -cost.k3)[:most] for kind in KINDS}
    return Costs(total=total, by={kind: [cost for cost in ordered[kind] if cost.k3 > 0] for kind in KINDS})


def _divided(each: Shown, read: Read) -> Iterator[tuple[Kind, str, float]]:
    """The parts of a completion by word and by prompt: kind, label, k3; only tokens whose k3 is known count."""
    parts = {i: k3(ratio) for i, ratio in enumerate(each.ratios) if math.isfinite(ratio)}
    if not parts:
        return
    for word, inside in words_of([read(str(token)) for token in each.completion.tokens]):
        if counted := [parts[i] for i in inside if i in parts]:
            yield "word", word, sum(counted)
    yield "prompt", each.completion.prompt or each.completion.group, sum(parts.values())


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
        inside.append(i)
    if inside:
        yield _word(texts, inside), inside


def _word(texts: Sequence[str], inside: Sequence[int]) -> str:
    text = "".join([texts[i] for i in inside])
    return text.strip() or text


def cost_section(costs: Costs) -> Html:
    """The tables of costs."""
    if costs.total <= 0:
        return Html()
    text = (
        "k3 to the reference, summed over the trained tokens that it scored, on this page or not: "
        f"{short(costs.total)} nats."
    )
    tables = [
        element(
            "div",
            element("h4", f"By {kind}", id=f"cost-{kind}"),
            _table(kind, [cost for cost in costs.by[kind] if cost.label], costs.total),
            class_=f"cost by-{kind}",
        )
        for kind in KINDS
    ]
    heading = element("h3", "What costs the most KL", id="costs")
    return join([heading, element("p", text, class_="aside"), element("div", *tables, class_="costs")])


def _table(kind: Kind, costs: Sequence[Cost], total: float) -> Html:
    headings = (kind, "share", "nats", "nats each", "completions" if kind == "prompt" else "times")
    longest = PROMPT if kind == "prompt" else WORD
    rows = [
        (
            element("code", shown(cost.label, longest=longest).replace("\n", "")),
            f"{100 * cost.k3 / total:.1f} %",
            short(cost.k3),
            short(cost.mean),
            str(cost.times),
        )
        for cost in costs
    ]
    return plain_table(headings, rows, caption=f"the KL by {kind}")
