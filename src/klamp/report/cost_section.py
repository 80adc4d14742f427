"""What costs the most KL over a whole run: which words, positions and prompts, in which completions, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from klamp.report.completions import BINS, Shown, k3
from klamp.report.figure import plain_table
from klamp.report.run import ReportRun
from klamp.report.text import Html, Read, count, element, join, short, shorten, shown
from klamp.report.tokens import shade

ROWS = 10
"""The most words, positions and prompts."""
LINKS = 2
"""Completions of each that are linked to."""
BEHIND = 50
"""The most completions that a button shows."""
PAIRS = 6
"""Prompts that are shown early and late."""
LONG = 240
"""Tokens of a completion that are shown beside its other."""
PROMPT = 90
"""Characters of a prompt in the table."""


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
    """How often it occurs."""

    @property
    def mean(self) -> float:
        """The mean of k3 over its occurrences, in nats."""
        return self.k3 / self.times if self.times else 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What all completions that were written cost, thrice divided."""

    total: float
    """The sum of k3 over all tokens, in nats."""
    words: Sequence[Cost]
    """By word, the costliest first."""
    positions: Sequence[Cost]
    """By position among the tokens that the model wrote, the costliest first."""
    prompts: Sequence[Cost]
    """By prompt, the costliest first; an occurrence is a completion."""
    width: int
    """How many positions are joined."""


Shares = Mapping[str, Sequence[Share]]
"""Label -> what each completion on the page adds, the largest first."""


def costs_of(completions: Sequence[Shown], readers: Sequence[Read], *, most: int) -> Costs:
    """The costs of all completions that a reference has scored.

    Args:
        completions: as `ranked` gives them.
        readers: of each run: turns its tokens into text.
        most: words, positions and prompts to keep.
    """
    known = [each for each in completions if each.against == "reference"]
    longest = max((sum(each.completion.is_sampled) for each in known), default=0)
    width = math.ceil(longest / BINS) or 1
    words, positions, prompts = _Tally(), _Tally(), _Tally()
    for each in known:
        parts = _parts(each)
        for word, inside in _words(each, readers[each.run], parts):
            words.add(word, each.times, sum([parts[i] for i in inside]))
        for label, i in _positions(each, parts, width):
            positions.add(label, each.times, parts[i])
        if parts:
            prompts.add(prompt_of(each), each.times, sum(parts.values()))
    return Costs(
        total=sum(each.k3 for each in prompts.found.values()),
        words=words.costliest(most),
        positions=positions.costliest(most),
        prompts=[each for each in prompts.costliest(most) if each.label],
        width=width,
    )


def shares_of(costs: Costs, kept: Mapping[int, Shown], readers: Sequence[Read]) -> tuple[Shares, Shares, Shares]:
    """What the completions on the page add to the costliest words, positions and prompts.

    Only these have a share: of all that were written, the shares would take more memory than the record.

    Args:
        costs: of all completions.
        kept: those on the page, by number.
        readers: of each run: turns its tokens into text.
    """
    words, positions, prompts = (_Behind(found) for found in (costs.words, costs.positions, costs.prompts))
    for number, each in kept.items():
        if each.against == "reference":
            parts = _parts(each)
            by_word = _words(each, readers[each.run], parts)
            by_position = _positions(each, parts, costs.width)
            words.add(number, each.times, ((word, {i: parts[i] for i in inside}) for word, inside in by_word))
            positions.add(number, each.times, ((label, {i: parts[i]}) for label, i in by_position))
            prompts.add(number, each.times, [(prompt_of(each), parts)])
    return words.shares(), positions.shares(), prompts.shares()


def prompt_of(each: Shown) -> str:
    """The prompt of a completion; where the record has none, the name of its group."""
    return each.completion.prompt or each.completion.group


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
    text = texts[inside[0]] if len(inside) == 1 else "".join([texts[i] for i in inside])
    return text.strip() or text


def _parts(each: Shown) -> dict[int, float]:
    """Position -> k3 there, where it is known."""
    return {i: k3(ratio) for i, ratio in enumerate(each.ratios) if math.isfinite(ratio)}


def _words(each: Shown, read: Read, parts: Mapping[int, float]) -> Iterator[tuple[str, list[int]]]:
    """The words that have a number, each with the positions of its tokens that have one."""
    for word, inside in words_of([read(str(token)) for token in each.completion.tokens]):
        counted = [i for i in inside if i in parts]
        if counted:
            yield word, counted


def _positions(each: Shown, parts: Iterable[int], width: int) -> Iterator[tuple[str, int]]:
    """The name of the stretch of each token that has a number, and its position."""
    begin = next((i for i, sampled in enumerate(each.completion.is_sampled) if sampled), 0)
    return ((_stretch(i - begin, width), i) for i in parts)


@cache
def _stretch(place: int, width: int) -> str:
    first = place // width * width + 1
    return str(first) if width == 1 else f"{first}–{first + width - 1}"


class _Tally:
    """Sums by label."""

    def __init__(self) -> None:
        self.found: dict[str, Cost] = {}

    def add(self, label: str, times: int, part: float) -> None:
        """Count what some tokens of a completion cost."""
        cost = self.found.get(label)
        if cost is None:
            cost = self.found[label] = Cost(label=label)
        cost.k3 += times * part
        cost.times += times

    def costliest(self, most: int) -> list[Cost]:
        """The costliest labels."""
        return sorted((cost for cost in self.found.values() if cost.k3 > 0), key=lambda cost: -cost.k3)[:most]


class _Behind:
    """The tokens behind some labels, by completion."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self.found: dict[str, list[Share]] = {cost.label: [] for cost in costs}

    def add(self, number: int, times: int, labelled: Iterable[tuple[str, Mapping[int, float]]]) -> None:
        """Note what the tokens of a completion cost in all its twins."""
        found: dict[str, dict[int, float]] = {}
        for label, parts in labelled:
            if label in self.found and parts:
                found.setdefault(label, {}).update(parts)
        for label, parts in found.items():
            worst = max(parts, key=lambda i, parts=parts: parts[i])
            self.found[label].append(Share(shown=number, k3=times * sum(parts.values()), position=worst))

    def shares(self) -> Shares:
        """Label -> what each completion adds, the largest first."""
        return {label: sorted(found, key=lambda share: -share.k3) for label, found in self.found.items()}


def cost_section(
    runs: Sequence[ReportRun],
    completions: Sequence[Shown],
    kept: Mapping[int, Shown],
    costs: Costs,
    behind: Sequence[Shares],
    readers: Sequence[Callable[[str], str]],
) -> Html:
    """The tables of costs, and the same prompts early and late.

    Args:
        runs: those of the report.
        completions: all of them.
        kept: those on the page, by number.
        costs: of all of them.
        behind: what those on the page add to words, positions and prompts.
        readers: of each run: turns its tokens into text.
    """
    if costs.total <= 0:
        return Html()
    over = f" of {len(runs)} runs" if len(runs) > 1 else ""
    text = (
        f"k3 summed over all {count(sum(each.times for each in completions), 'completion')}{over} that were written, "
        f"{short(costs.total)} nats, whether there is room for them below or not."
    )
    found = (costs.words, costs.positions, costs.prompts)
    tables = [
        element(
            "div",
            element("h4", f"By {name}", id=f"cost-{name}"),
            _table(name, some, shares, kept, costs.total),
            class_=f"cost by-{name}",
        )
        for name, some, shares in zip(("word", "position", "prompt"), found, behind, strict=True)
        if some
    ]
    return join(
        [
            element("h3", "What costs the most KL", id="costs"),
            element("p", text, class_="aside"),
            element("div", *tables, class_="costs"),
            *_pairs(runs, completions, costs, readers),
        ]
    )


def shares_linked(shares: Sequence[Shares]) -> dict[int, frozenset[int]]:
    """The positions that the tables link to: number of a completion on the page -> positions.

    Args:
        shares: those behind words, positions and prompts.
    """
    found: dict[int, frozenset[int]] = {}
    for each in (each for some in shares for each in some.values()):
        for share in each[:LINKS]:
            found[share.shown] = found.get(share.shown, frozenset()) | {share.position}
    return found


def _table(name: str, found: Sequence[Cost], shares: Shares, kept: Mapping[int, Shown], total: float) -> Html:
    often = "completions" if name == "prompt" else "times"
    headings = (name, "share", "nats", "nats each", often, "where")
    rows = [
        (
            _label(name, cost),
            f"{100 * cost.k3 / total:.1f} %",
            short(cost.k3),
            short(cost.mean),
            str(cost.times),
            _where(name, cost, shares[cost.label], kept),
        )
        for cost in found
    ]
    return plain_table(headings, rows, caption=f"the KL by {name}")


def _label(name: str, cost: Cost) -> Html:
    if name == "position":
        return Html(cost.label)
    longest = PROMPT if name == "prompt" else 24
    return element("code", shown(cost.label, longest=longest).replace("\n", ""))


def _where(name: str, cost: Cost, here: Sequence[Share], kept: Mapping[int, Shown]) -> Html:
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
    numbers = " ".join(str(share.shown) for share in here[:BEHIND])
    label = f"{name} {shown(cost.label, longest=40)}".replace("\n", "")
    button = element(
        "button",
        f"all {len(here[:BEHIND])}",
        type="button",
        class_="only",
        data_cards=numbers,
        data_label=label,
        hidden=True,
    )
    return join([join(links, ", "), Html(" "), button])


def pairs_of(completions: Sequence[Shown], costs: Costs) -> list[tuple[Shown, Shown]]:
    """The same prompt in its first and in its last step, for the costliest prompts that come up more than once.

    Args:
        completions: all of them.
        costs: of them.
    """
    runs: dict[str, dict[int, list[Shown]]] = {cost.label: {} for cost in costs.prompts}
    for each in completions:
        if prompt_of(each) in runs and each.against == "reference" and any(map(math.isfinite, each.ratios)):
            runs[prompt_of(each)].setdefault(each.run, []).append(each)
    found: list[tuple[Shown, Shown]] = []
    for several in runs.values():
        for some in _costliest_first(list(several.values())):
            early = min(some, key=lambda each: (each.completion.step, each.index))
            late = min(some, key=lambda each: (-each.completion.step, each.index))
            found += [(early, late)] if early.completion.step < late.completion.step else []
    return found[:PAIRS]


def _costliest_first(runs: Sequence[list[Shown]]) -> Sequence[list[Shown]]:
    """Completions of several runs, those of the run with the costliest one first."""
    return runs if len(runs) == 1 else sorted(runs, key=lambda some: -max(each.times * each.k3 for each in some))


def _pairs(
    runs: Sequence[ReportRun], completions: Sequence[Shown], costs: Costs, readers: Sequence[Callable[[str], str]]
) -> list[Html]:
    rows = [
        (
            join([shorten(early.completion.prompt or early.completion.group, PROMPT), *_run(runs, early)]),
            _side(early, readers[early.run]),
            _side(late, readers[late.run]),
        )
        for early, late in pairs_of(completions, costs)
    ]
    if not rows:
        return []
    table = plain_table(("prompt", "early", "late"), rows, caption="the same prompt early and late", classes="pairs")
    return [element("h3", "The same prompt, early and late", id="pairs"), table]


def _run(runs: Sequence[ReportRun], each: Shown) -> list[Html]:
    return [element("small", runs[each.run].name)] if len(runs) > 1 else []


def _side(each: Shown, read: Callable[[str], str]) -> Html:
    completion = each.completion
    tokens = [
        element("span", shown(read(str(token))), class_="u" if math.isnan(ratio) else shade(ratio))
        for token, ratio in zip(completion.tokens[:LONG], each.ratios[:LONG], strict=True)
    ]
    more = [f" … ({len(completion.tokens) - LONG} more tokens)"] if len(completion.tokens) > LONG else []
    facts = [f"step {completion.step}", f"KL {short(each.k3)} nats"]
    facts += [] if completion.reward is None else [f"reward {short(completion.reward)}"]
    return join([element("div", *tokens, *more, class_="side"), element("small", ", ".join(facts))])
