"""The section of completions: the worst tokens, filters, and as many completions as the page can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from klamp.report.completions import Shown, recorded, worst_tokens
from klamp.report.run import ReportRun
from klamp.report.text import Html, count, element, join, plain_table, probability, shown, signed
from klamp.report.tokens import DISTANCES, EDGES, card, legend, shade

WORST = 15
"""Rows of the table of the worst tokens."""
BEFORE, AFTER = 8, 4
"""Tokens before and after a worst token in its context."""
FRAME = 30_000
"""Bytes of the page that are reserved for the tables above the completions."""
NARROW = 24
"""The most characters of a token in a table."""
PATIENCE = 200
"""The search for completions that fit ends after this many in a row that are too large."""
SORTS = {
    "worst": "worst token first",
    "kl": "largest KL first",
    "step": "by step",
    "last": "last step first",
    "reward": "highest reward first",
    "low": "lowest reward first",
    "length": "longest first",
}


def fitting(runs: Sequence[ReportRun], completions: Sequence[Shown], *, room: int) -> dict[int, Html]:
    """The cards that the page can hold, by the number of their completion, in the order of importance.

    A completion that is too large makes room for smaller ones; a long run has tens of thousands of them.
    """
    cards: dict[int, Html] = {}
    missed, room = 0, room - FRAME
    for number, each in enumerate(completions):
        drawn = card(each, number, read=runs[each.run].read, label=runs[each.run].name if len(runs) > 1 else "")
        size = len(drawn.encode())
        if size <= room:
            cards[number], room, missed = drawn, room - size, 0
        elif (missed := missed + 1) == PATIENCE:
            break
    return cards


def token_section(runs: Sequence[ReportRun], completions: Sequence[Shown], cards: Mapping[int, Html]) -> Html:
    """The section about completions and their tokens."""
    if not completions:
        text = (
            "No completions with token log-probabilities were written. klamp writes some every "
            "log_completions_every steps; for other trainers see the names that `klamp doctor` reads."
        )
        return element("p", text, class_="missing")
    here = {number: completions[number] for number in cards}
    return join(
        [
            element("p", said(completions, list(here.values())), class_="aside", id="left-out"),
            _worst_table(runs, here),
            element("h3", "Completions", id="all-completions"),
            *_anchor_choice(completions),
            legend(sorted({each.against for each in completions if each.against})),
            _filters(runs, completions),
            element("p", id="count", class_="count", role="status"),
            element("div", *cards.values(), id="completions"),
            element("button", "Show more", type="button", id="more", hidden=True),
        ]
    )


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


def jump(each: Shown, number: int, position: int) -> Html:
    """A link to a token: to its card, where the script takes the focus to the token."""
    place = f"step {each.completion.step}, completion {each.index + 1}, position {position + 1}"
    return element("a", place, href=f"#c{number}", class_="jump", data_position=position)


def _worst_table(runs: Sequence[ReportRun], completions: Mapping[int, Shown]) -> Html:
    rows: list[list[str]] = []
    for number, position in worst_tokens(completions, most=WORST):
        each = completions[number]
        completion, ratio = each.completion, each.ratios[position]
        read = runs[each.run].read
        texts = [shown(read(str(token)), longest=NARROW).replace("\n", "") for token in completion.tokens]
        rows.append(
            [
                element("code", texts[position], class_=shade(ratio)),
                signed(ratio),
                probability(completion.policy[position]),
                probability(completion.policy[position] - ratio),
                _context(texts, position, shade(ratio)),
                *([runs[each.run].name] if len(runs) > 1 else []),
                jump(each, number, position),
            ]
        )
    if not rows:
        return element("p", "No token here has a log-ratio other than 0.", class_="missing")
    against = " or ".join(sorted({each.against for each in completions.values() if each.against}))
    run = ["run"] if len(runs) > 1 else []
    headings = ["token", "log-ratio", "policy", against, "in context", *run, "where"]
    table = plain_table(headings, rows, caption="tokens with the largest |log-ratio| on this page", classes="worst")
    return join([element("h3", "Worst tokens", id="worst-tokens"), table])


def _context(texts: Sequence[str], position: int, shade: str) -> Html:
    """The tokens before and after a token."""
    first, end = max(0, position - BEFORE), position + 1 + AFTER
    before = "…" * (first > 0) + "".join(texts[first:position])
    after = "".join(texts[position + 1 : end]) + "…" * (end < len(texts))
    return element("code", before, element("b", texts[position], class_=shade), after, class_="context")


def _anchor_choice(completions: Sequence[Shown]) -> list[Html]:
    """The choice of the model that the shades compare the policy with, if the record has several."""
    there = {anchor for each in completions for anchor in recorded(each.completion)}
    names = [(anchor, anchor) for anchor in DISTANCES if anchor in there]
    choice = _select("against", "Shades compare the policy with the", names)
    edges = " ".join(map(str, EDGES))
    return [element("div", choice, id="against", data_edges=edges, hidden=True)] if len(names) > 1 else []


def _filters(runs: Sequence[ReportRun], completions: Sequence[Shown]) -> Html:
    steps = [each.completion.step for each in completions]
    limits = {"type": "number", "inputmode": "decimal", "min": min(steps), "max": max(steps), "step": 1}
    names = [("", "all runs"), *((str(number), run.name) for number, run in enumerate(runs))]
    blamed = element("input", type="checkbox", id="f-blamed", disabled=not any(each.blamed for each in completions))
    parts = [
        *([_select("run", "Run", names)] if len(runs) > 1 else []),
        _field("step-from", "Step from", element("input", id="f-step-from", placeholder=str(min(steps)), **limits)),
        _field("step-to", "to", element("input", id="f-step-to", placeholder=str(max(steps)), **limits)),
        _field("text", "Text", element("input", type="search", id="f-text", autocomplete="off", spellcheck="false")),
        _select("sort", "Order", list(SORTS.items())),
        element("label", blamed, " blamed by an alarm", class_="check"),
        element("button", "Clear", type="button", id="clear"),
    ]
    return element("form", *parts, id="filters", aria_label="Filter the completions", hidden=True)


def _field(name: str, label: str, control: Html) -> Html:
    return element("div", element("label", label, for_=f"f-{name}"), control, class_="field")


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
    choices = [element("option", text, value=value) for value, text in options]
    return _field(name, label, element("select", *choices, id=f"f-{name}"))
