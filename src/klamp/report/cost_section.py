"""What costs the most KL over a whole run: which words, positions and prompts, in which completions, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from klamp.report.completions import BINS, Shown, k3
from klamp.report.run import ReportRun
from klamp.report.text import Html, Read, count, element, join, plain_table, short, shown

ROWS = 10
"""The most words, positions and prompts."""
LINKS = 2
"""Completions of each that are linked to."""
BEHIND = 50
"""The most completions that a button shows."""
PROMPT = 90
"""Characters of a prompt in the table."""

Kind: TypeAlias = Literal["word", "position", "prompt"]
KINDS: tuple[Kind, ...] = ("word", "position", "prompt")
"""How a cost is divided: by word, by position among the tokens that the model wrote, by prompt."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one completion adds to a cost."""

    shown: int
    """The number of the completion."""
    k3: float
    """Its part, in nats; twins count each."""
    position: int
    """The position of its token with the largest part."""


@dataclass(kw_only=True, slots=True)
class Cost:
    """What one word, position or prompt costs, over all completions that were written."""

    label: str
    """The word, the positions, or the prompt."""
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
    """What all completions that were written cost, thrice divided."""

    total: float
    """The sum of k3 over all tokens, in nats."""
    by: Mapping[Kind, Sequence[Cost]]
    """The costliest words, positions and prompts, the costliest first."""
    width: int
    """How many positions are joined."""


Shares = Mapping[Kind, Mapping[str, Sequence[Share]]]
"""Kind -> label -> what each completion on the page adds, the largest first."""


def costs_of(completions: Sequence[Shown], readers: Sequence[Read], *, most: int = ROWS) -> Costs:
    """The costs of all completions that a reference has scored.

    Args:
        completions: as `ranked` gives them.
        readers: of each run: turns its tokens into text.
        most: words, positions and prompts to keep.
    """
    known = [each for each in completions if each.against == "reference"]
    longest = max((sum(each.completion.is_sampled) for each in known), default=0)
    width = math.ceil(longest / BINS) or 1
    found: dict[Kind, dict[str, Cost]] = {kind: {} for kind in KINDS}
    for each in known:
        for kind, label, parts in _divided(each, readers[each.run], width):
            cost = found[kind].get(label)
            if cost is None:
                cost = found[kind][label] = Cost(label=label)
            cost.k3 += each.times * sum(parts.values())
            cost.times += each.times
    costly: dict[Kind, list[Cost]] = {kind: [cost for cost in found[kind].values() if cost.k3 > 0] for kind in KINDS}
    kept: dict[Kind, list[Cost]] = {
        kind: sorted(costs, key=lambda cost: -cost.k3)[:most] for kind, costs in costly.items()
    }
    kept["prompt"] = [cost for cost in kept["prompt"] if cost.label]
    return Costs(total=sum(cost.k3 for cost in found["prompt"].values()), by=kept, width=width)


def shares_of(costs: Costs, kept: Mapping[int, Shown], readers: Sequence[Read]) -> Shares:
    """What the completions on the page add to the costliest words, positions and prompts.

    Only these have a share: of all that were written, the shares would take more memory than the record.

    Args:
        costs: of all completions.
        kept: those on the page, by number.
        readers: of each run: turns its tokens into text.
    """
    found: dict[Kind, dict[str, list[Share]]] = {kind: {cost.label: [] for cost in costs.by[kind]} for kind in KINDS}
    for number, each in kept.items():
        own: dict[tuple[Kind, str], dict[int, float]] = {}
        for kind, label, parts in _divided(each, readers[each.run], costs.width) if each.against == "reference" else ():
            if label in found[kind]:
                own.setdefault((kind, label), {}).update(parts)
        for (kind, label), parts in own.items():
            worst = max(parts, key=parts.__getitem__)
            found[kind][label].append(Share(shown=number, k3=each.times * sum(parts.values()), position=worst))
    for shares in (shares for some in found.values() for shares in some.values()):
        shares.sort(key=lambda share: -share.k3)
    return found


def _divided(each: Shown, read: Read, width: int) -> Iterator[tuple[Kind, str, Mapping[int, float]]]:
    """The parts of a completion by word, by position and by prompt: its kind, its label, position -> k3 there.

    Only tokens whose k3 is known count.
    """
    parts = {i: k3(ratio) for i, ratio in enumerate(each.ratios) if math.isfinite(ratio)}
    if not parts:
        return
    for word, inside in words_of([read(str(token)) for token in each.completion.tokens]):
        if counted := {i: parts[i] for i in inside if i in parts}:
            yield "word", word, counted
    begin = next((i for i, sampled in enumerate(each.completion.is_sampled) if sampled), 0)
    for i, part in parts.items():
        yield "position", _stretch(i - begin, width), {i: part}
    yield "prompt", each.completion.prompt or each.completion.group, parts


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


@cache
def _stretch(place: int, width: int) -> str:
    first = place // width * width + 1
    return str(first) if width == 1 else f"{first}–{first + width - 1}"


def cost_section(
    runs: Sequence[ReportRun], completions: Sequence[Shown], kept: Mapping[int, Shown], costs: Costs, behind: Shares
) -> Html:
    """The tables of costs.

    Args:
        runs: those of the report.
        completions: all of them.
        kept: those on the page, by number.
        costs: of all of them.
        behind: what those on the page add.
    """
    if costs.total <= 0:
        return Html()
    over = f" of {len(runs)} runs" if len(runs) > 1 else ""
    text = (
        f"k3 summed over all {count(sum(each.times for each in completions), 'completion')}{over} that were written, "
        f"{short(costs.total)} nats, whether there is room for them below or not."
    )
    tables = [
        element(
            "div",
            element("h4", f"By {kind}", id=f"cost-{kind}"),
            _table(kind, costs, behind[kind], kept),
            class_=f"cost by-{kind}",
        )
        for kind in KINDS
        if costs.by[kind]
    ]
    heading = element("h3", "What costs the most KL", id="costs")
    return join([heading, element("p", text, class_="aside"), element("div", *tables, class_="costs")])


def shares_linked(shares: Shares) -> dict[int, frozenset[int]]:
    """The positions that the tables link to: number of a completion on the page -> positions.

    Args:
        shares: those behind words, positions and prompts.
    """
    found: dict[int, frozenset[int]] = {}
    for some in (some for kind in shares.values() for some in kind.values()):
        for share in some[:LINKS]:
            found[share.shown] = found.get(share.shown, frozenset()) | {share.position}
    return found


def _table(kind: Kind, costs: Costs, shares: Mapping[str, Sequence[Share]], kept: Mapping[int, Shown]) -> Html:
    headings = (kind, "share", "nats", "nats each", "completions" if kind == "prompt" else "times", "where")
    rows = [
        (
            _label(kind, cost),
            f"{100 * cost.k3 / costs.total:.1f} %",
            short(cost.k3),
            short(cost.mean),
            str(cost.times),
            _where(kind, cost, shares[cost.label], kept),
        )
        for cost in costs.by[kind]
    ]
    return plain_table(headings, rows, caption=f"the KL by {kind}")


def _label(kind: Kind, cost: Cost) -> Html:
    if kind == "position":
        return Html(cost.label)
    longest = PROMPT if kind == "prompt" else 24
    return element("code", shown(cost.label, longest=longest).replace("\n", ""))


def _where(kind: Kind, cost: Cost, here: Sequence[Share], kept: Mapping[int, Shown]) -> Html:
    if not here:
        return element("span", "not on the page", class_="since")
    links = [
        element(
            "a",
            f"step {kept[share.shown].completion.step}",
            element("span", f", completion {kept[share.shown].index + 1}", class_="unseen"),
            href=f"#c{share.shown}-{share.position}",
            class_="jump",
        )
        for share in here[:LINKS]
    ]
    button = element(
        "button",
        f"all {len(here[:BEHIND])}",
        type="button",
        class_="only",
        data_cards=" ".join(str(share.shown) for share in here[:BEHIND]),
        data_label=f"{kind} {shown(cost.label, longest=40)}".replace("\n", ""),
        hidden=True,
    )
    return join([join(links, ", "), Html(" "), button])
