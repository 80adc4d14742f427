"""The section of costs: the words, positions and prompts that cost the most KL, and the same prompt early and late."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from klamp.report.choice import Shown
from klamp.report.cost import Cost, Costs, Share, Shares, prompt_of
from klamp.report.figure import plain_table
from klamp.report.markup import Html, element, join, shorten
from klamp.report.numerals import count, short
from klamp.report.run import ReportRun
from klamp.report.tokens import shade
from klamp.report.vocabulary import shown

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
