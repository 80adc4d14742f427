"""The section of completions: the worst tokens, filters, and as many completions as the page can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.report.completions import Place, Shown, recorded, worst_tokens
from klamp.report.cost_section import Costs, cost_section
from klamp.report.run import ReportRun
from klamp.report.text import Html, Read, count, element, join, json_block, plain_table, probability, shown, signed
from klamp.report.tokens import DISTANCES, EDGES, card, legend, numbers_of, shade

WORST = 15
BEFORE, AFTER, PROMPT = 8, 4, 40
"""Tokens before and after a worst token, and characters of its prompt, that stand beside it."""
FRAME = 30_000
"""Bytes of the page that are kept for everything but completions."""
NARROW = 24
"""The most characters of a token in the table of the worst ones."""
LEAST = 30
"""The fewest bytes that a token needs on the page."""
PATIENCE = 200
"""So many completions in a row that were drawn and found too large for what is left of the page end the search."""
SORTS = {
    "worst": "worst token first",
    "kl": "largest KL first",
    "step": "by step",
    "last": "last step first",
    "reward": "highest reward first",
    "low": "lowest reward first",
    "length": "longest first",
}


def token_section(runs: Sequence[ReportRun], completions: Sequence[Shown], kept: Sequence[int], spent: Costs) -> Html:
    """The section about completions and their tokens.

    Args:
        runs: those of the report.
        completions: all of them, the worst first.
        kept: numbers of those that there is room for.
        spent: what all of them cost.
    """
    if not completions:
        text = (
            "No completions with token log-probabilities were written. klamp writes some every "
            "log_completions_every steps; for other trainers see the names that `klamp doctor` reads."
        )
        return element("p", text, class_="missing")
    readers = [run.read for run in runs]
    here = {number: completions[number] for number in kept}
    worst = worst_tokens(here, most=WORST)
    linked = links(here, worst)
    cards = [
        card(each, number, read=readers[each.run], label=_label(runs, each), linked=linked.get(number, frozenset()))
        for number, each in here.items()
    ]
    return join(
        [
            element("p", said(completions, list(here.values())), class_="aside", id="left-out"),
            _worst_table(runs, here, worst, readers),
            cost_section(spent),
            element("h3", "Completions", id="all-completions"),
            *_anchor_choice(completions),
            legend(sorted({each.against for each in completions if each.against})),
            _filters(runs, completions),
            element("p", id="count", class_="count", role="status"),
            element("div", *cards, id="completions"),
            element("button", "Show more", type="button", id="more", hidden=True),
            json_block({str(number): numbers_of(each) for number, each in here.items()}, name="numbers"),
        ]
    )


def fitting(runs: Sequence[ReportRun], completions: Sequence[Shown], *, room: int) -> list[int]:
    """The numbers of the completions that the page can hold, first ones first; too large ones are passed over.

    A long run has tens of thousands of them, and what is left of a page is soon too small for most: see `PATIENCE`.

    Args:
        runs: those of the report.
        completions: in the order of their importance.
        room: bytes.
    """
    readers = [run.read for run in runs]
    kept: list[int] = []
    missed, room = 0, room - FRAME
    for number, each in enumerate(completions):
        if missed == PATIENCE:
            break
        begin, end = each.span
        if LEAST * (end - begin) > room:
            continue
        whole = card(each, number, read=readers[each.run], label=_label(runs, each), linked=frozenset())
        size = len(whole.encode()) + len(json.dumps(numbers_of(each), separators=(",", ":"))) + 12
        missed = 0 if size <= room else missed + 1
        if size <= room:
            kept.append(number)
            room -= size
    return kept


def said(completions: Sequence[Shown], kept: Sequence[Shown]) -> str:
    """A sentence on how many completions are on the page, and how many are not."""
    total, here = (sum(each.times for each in some) for some in (completions, kept))
    if total == here == 1:
        return "The only completion that was written."
    whole = len(kept) == len(completions)
    text = f"{'All' if whole else f'{here} of'} {count(total, 'completion')}"
    text += f", {count(len(kept), 'card')} where twins are joined" if here != len(kept) else ""
    text += ", the worst token first" + (" after those that an alarm blames" if any(e.blamed for e in kept) else "")
    return f"{text}." if whole else f"{text}. The others are left out for the size of the page."


def links(completions: Mapping[int, Shown], worst: Sequence[Place]) -> Mapping[int, frozenset[int]]:
    """The positions that the page links to, by completion: the worst tokens, and those that alarms blame."""
    found: dict[int, frozenset[int]] = {}
    for place in worst:
        found[place.shown] = found.get(place.shown, frozenset()) | {place.position}
    for number, each in completions.items():
        begin, end = each.span
        inside = frozenset(position for position in each.blamed if begin <= position < end)
        if inside:
            found[number] = found.get(number, frozenset()) | inside
    return found


def _label(runs: Sequence[ReportRun], each: Shown) -> str:
    return runs[each.run].name if len(runs) > 1 else ""


def _worst_table(
    runs: Sequence[ReportRun],
    completions: Mapping[int, Shown],
    worst: Sequence[Place],
    readers: Sequence[Read],
) -> Html:
    if not worst:
        return element("p", "No token here has a log-ratio other than 0.", class_="missing")
    several = len(runs) > 1
    against = " or ".join(sorted({each.against for each in completions.values() if each.against}))
    headings = ["token", "log-ratio", "policy", against, "in context", "position", "times"]
    headings += [*(["run"] if several else []), "where"]
    rows = [_worst_row(runs, completions[place.shown], place, readers) for place in worst]
    return join(
        [
            element("h3", "Worst tokens", id="worst-tokens"),
            plain_table(headings, rows, caption="tokens with the largest |log-ratio| on this page", classes="worst"),
        ]
    )


def _worst_row(runs: Sequence[ReportRun], each: Shown, place: Place, readers: Sequence[Read]) -> list[str]:
    completion, position = each.completion, place.position
    other, read = each.other, readers[each.run]
    assert other is not None
    link = element(
        "a", f"step {completion.step}, completion {each.index + 1}", href=f"#c{place.shown}-{position}", class_="jump"
    )
    return [
        element("code", _one_line(read, each, position), class_=shade(each.ratios[position])),
        signed(each.ratios[position]),
        probability(completion.policy[position]),
        probability(other[position]),
        _context(read, each, position),
        str(position + 1),
        f"×{place.times}" if place.times > 1 else "1",
        *([runs[each.run].name] if len(runs) > 1 else []),
        link,
    ]


def _one_line(read: Read, each: Shown, position: int) -> str:
    return shown(read(str(each.completion.tokens[position])), longest=NARROW).replace("\n", "")


def _context(read: Read, each: Shown, position: int) -> Html:
    """The text around a token: some tokens before and after, and the end of the prompt at the beginning."""
    tokens = range(len(each.completion.tokens))
    before = "".join(_one_line(read, each, i) for i in tokens[max(0, position - BEFORE) : position])
    after = "".join(_one_line(read, each, i) for i in tokens[position + 1 : position + 1 + AFTER])
    prompt = each.completion.prompt[-PROMPT:].replace("\n", "↵") if position <= BEFORE else ""
    return element(
        "code",
        *([element("span", prompt, class_="asked"), Html(" ")] if prompt else []),
        "…" if position > BEFORE else "",
        before,
        element("b", _one_line(read, each, position), class_=shade(each.ratios[position])),
        after,
        "…" if position + 1 + AFTER < len(tokens) else "",
        class_="context",
    )


def _anchor_choice(completions: Sequence[Shown]) -> list[Html]:
    """The control that says which model the shades compare the policy with; none where there is no choice."""
    there = {anchor for each in completions for anchor in recorded(each.completion)}
    names = [(anchor, anchor) for anchor in DISTANCES if anchor in there]
    edges = " ".join(map(str, EDGES))
    choice = _select("against", "Shades compare the policy with the", names)
    return [element("div", choice, id="against", data_edges=edges, hidden=True)] if len(names) > 1 else []


def _filters(runs: Sequence[ReportRun], completions: Sequence[Shown]) -> Html:
    steps = [each.completion.step for each in completions]
    parts: list[Html] = []
    if len(runs) > 1:
        names = [("", "all runs"), *((str(number), run.name) for number, run in enumerate(runs))]
        parts.append(_select("run", "Run", names))
    parts += [
        _number("step-from", "Step from", min=min(steps), max=max(steps), step=1, placeholder=str(min(steps))),
        _number("step-to", "to", min=min(steps), max=max(steps), step=1, placeholder=str(max(steps))),
        _number("reward-from", "Reward from", step="any"),
        _number("reward-to", "to", step="any"),
        _number("size", "|log-ratio| at least", min=0, step="any", placeholder="0"),
        _field("text", "Text", element("input", type="search", id="f-text", autocomplete="off", spellcheck="false")),
        _select("sort", "Order", list(SORTS.items())),
        element(
            "label",
            element("input", type="checkbox", id="f-blamed", disabled=not any(each.blamed for each in completions)),
            " blamed by an alarm",
            class_="check",
        ),
        element("button", "Clear", type="button", id="clear"),
    ]
    return element("form", *parts, id="filters", aria_label="Filter the completions", hidden=True)


def _field(name: str, label: str, control: Html) -> Html:
    return element("div", element("label", label, for_=f"f-{name}"), control, class_="field")


def _number(name: str, label: str, **limits: Any) -> Html:
    return _field(name, label, element("input", type="number", id=f"f-{name}", inputmode="decimal", **limits))


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
    choices = [element("option", text, value=value) for value, text in options]
    return _field(name, label, element("select", *choices, id=f"f-{name}"))
