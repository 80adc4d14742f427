"""The completions of the page: which ones, the worst first; a card of each, its tokens shaded by their log-ratios."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from klamp.doctor.history import Completion, k3
from klamp.report.run import OURS, ReportRun
from klamp.report.text import (
    MISSING,
    Html,
    count,
    element,
    join,
    plain_table,
    probability,
    short,
    shorten,
    shown,
    signed,
)

Anchor: TypeAlias = Literal["reference", "teacher", "sampler"]

LONGEST = 3000
"""The most tokens of a completion that are shown: a stretch around the worst one."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A completion on the page, together with equal ones."""

    run: int
    completion: Completion
    index: int
    """Its place among the completions of its step, from 0; of equal ones, the place of the first."""
    times: int
    """How many completions are equal to it, token for token and number for number."""
    against: Anchor | None
    """The model whose log-probabilities the policy's are compared with."""
    ratios: Sequence[float]
    """log policy - log other of each token; NaN if one is missing, or the token is not trained on."""
    blamed: frozenset[int] = frozenset()

    @property
    def worst(self) -> float:
        """The largest |log-ratio| of its tokens."""
        return max((abs(ratio) for ratio in self.ratios if math.isfinite(ratio)), default=0.0)

    @property
    def k1(self) -> float:
        """The sum of the log-ratios, in nats."""
        return sum(ratio for ratio in self.ratios if math.isfinite(ratio))

    @property
    def k3(self) -> float:
        """The sum of k3 over the tokens, in nats; against the sampler, k3 takes the sampler as the policy."""
        sign = -1 if self.against == "sampler" else 1
        return sum(k3(sign * ratio) for ratio in self.ratios if math.isfinite(ratio))

    def towards(self, anchor: Anchor) -> Self:
        """The same completion, compared with another model that scored it."""
        return replace(self, against=anchor, ratios=_ratios(self.completion, anchor))

    @property
    def span(self) -> tuple[int, int]:
        """The range of tokens that is shown."""
        total = len(self.completion.tokens)
        if total <= LONGEST:
            return 0, total
        sizes = [abs(ratio) if math.isfinite(ratio) else -1.0 for ratio in self.ratios]
        begin = min(max(0, sizes.index(max(sizes)) - LONGEST // 2), total - LONGEST)
        return begin, begin + LONGEST


def ranked(runs: Sequence[ReportRun]) -> list[Shown]:
    """All completions of the runs with equal ones joined, the worst first."""
    entries = [entry for number, run in enumerate(runs) for entry in _of_run(run, number)]
    return sorted(
        entries, key=lambda entry: (not entry.blamed, -entry.worst, entry.run, entry.completion.step, entry.index)
    )


def _of_run(run: ReportRun, number: int) -> Iterable[Shown]:
    blamed = _blamed_tokens(run)
    for step, completions in run.history.completions.items():
        twins: dict[tuple[object, ...], list[int]] = {}
        for index, completion in enumerate(completions):
            twins.setdefault(_identity(completion), []).append(index)
        for twin_indices in twins.values():
            first = completions[twin_indices[0]]
            against = next(iter(recorded(first)), None)
            yield Shown(
                run=number,
                completion=first,
                index=twin_indices[0],
                times=len(twin_indices),
                against=against,
                ratios=_ratios(first, against),
                blamed=frozenset().union(*(blamed.get((step, index), frozenset()) for index in twin_indices)),
            )


def _identity(completion: Completion) -> tuple[object, ...]:
    lists = (
        completion.tokens,
        completion.policy,
        completion.ref,
        completion.teacher,
        completion.sampler,
        completion.trained,
    )
    return (
        completion.group,
        completion.prompt,
        completion.reward,
        *(None if values is None else tuple(values) for values in lists),
    )


def recorded(completion: Completion) -> dict[Anchor, Sequence[float]]:
    """The other models that scored a completion, with their log-probabilities; the first is the default."""
    logprobs: dict[Anchor, Sequence[float] | None] = {
        "reference": completion.ref,
        "teacher": completion.teacher,
        "sampler": completion.sampler,
    }
    return {anchor: values for anchor, values in logprobs.items() if values is not None}


def _ratios(completion: Completion, against: Anchor | None) -> array[float]:
    if against is None:
        return array("d", [math.nan] * len(completion.tokens))
    rows = zip(completion.policy, recorded(completion)[against], completion.is_trained, strict=True)
    return array("d", [p - o if on and math.isfinite(p - o) else math.nan for p, o, on in rows])


def _blamed_tokens(run: ReportRun) -> Mapping[tuple[int, int], frozenset[int]]:
    positions: dict[tuple[int, int], frozenset[int]] = {}
    for finding in run.diagnosis.findings:
        for token in finding.evidence.tokens:
            place = (token.step, token.completion)
            positions[place] = positions.get(place, frozenset()) | {token.position}
    return positions


def worst_tokens(completions: Mapping[int, Shown], *, most: int) -> list[tuple[int, int]]:
    """(number of the completion, position) of the tokens with the largest |log-ratio|.

    Completions that begin alike share tokens: of equal tokens at one place of a step, the first counts.
    """
    places: dict[tuple[object, ...], tuple[int, int]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for number, entry in completions.items():
        for position in range(*entry.span):
            ratio = entry.ratios[position]
            if math.isfinite(ratio) and ratio != 0:
                token, step = str(entry.completion.tokens[position]), entry.completion.step
                identity = (entry.run, step, token, position, entry.completion.policy[position], ratio)
                sizes[places.setdefault(identity, (number, position))] = abs(ratio)
    return sorted(sizes, key=lambda place: -sizes[place])[:most]


# the section ----------------------------------------------------------------------------------------------------------

WORST = 10
"""Rows of the table of the worst tokens."""
BEFORE, AFTER = 8, 4
FRAME = 30_000
"""Bytes of the page that are reserved for the tables above the completions."""
NARROW = 24
"""The most characters of a token in a table."""
OF_TRL = "klamp.trl.ReportCallback writes some; klamp.trl's trainers have one, unless klamp_report=False."
WRITERS = {OURS: "klamp train writes some every log_completions_every steps.", "TRL trainer state": OF_TRL}
"""Where a run's record is from -> what writes completions there."""
OTHER_WRITERS = f"In TRL {OF_TRL} For other trainers see the names that `klamp doctor` reads."
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

    A completion that is too large makes room for smaller ones; a long run has tens of thousands.
    """
    cards: dict[int, Html] = {}
    misses, room = 0, room - FRAME
    for number, entry in enumerate(completions):
        html = card(entry, number, read=runs[entry.run].read, label=runs[entry.run].name if len(runs) > 1 else "")
        size = len(html.encode())
        if size <= room:
            cards[number], room, misses = html, room - size, 0
        elif (misses := misses + 1) == PATIENCE:
            break
    return cards


def token_section(runs: Sequence[ReportRun], completions: Sequence[Shown], cards: Mapping[int, Html]) -> Html:
    """The section about completions and their tokens."""
    if not completions:
        ways = dict.fromkeys(WRITERS.get(run.history.source, OTHER_WRITERS) for run in runs)
        return element(
            "p", " ".join(("No completions with token log-probabilities were written.", *ways)), class_="missing"
        )
    entries = {number: completions[number] for number in cards}
    return join(
        [
            element("p", said(completions, list(entries.values())), class_="aside", id="left-out"),
            _worst_table(runs, entries),
            element("h3", "Completions", id="all-completions"),
            *_anchor_choice(completions),
            legend(sorted({entry.against for entry in completions if entry.against})),
            _filters(runs, completions),
            element("p", id="count", class_="count", role="status"),
            element("div", *cards.values(), id="completions"),
            element("button", "Show more", type="button", id="more", hidden=True),
        ]
    )


def said(completions: Sequence[Shown], on_page: Sequence[Shown]) -> str:
    """A sentence on how many completions are on the page, and how many are not."""
    total, on_cards = (sum(entry.times for entry in group) for group in (completions, on_page))
    if total == on_cards == 1:
        return "The only completion that was written."
    complete = len(on_page) == len(completions)
    text = f"{'All' if complete else f'{on_cards} of'} {count(total, 'completion')}"
    text += f", {count(len(on_page), 'card')} where twins are joined" if on_cards != len(on_page) else ""
    text += ", the worst token first" + (" after those that an alarm blames" if any(e.blamed for e in on_page) else "")
    return f"{text}." if complete else f"{text}. The others are left out for the size of the page."


def jump(entry: Shown, number: int, position: int) -> Html:
    """A link to a token: to its card, where the script takes the focus to the token."""
    place = f"step {entry.completion.step}, completion {entry.index + 1}, position {position + 1}"
    return element("a", place, href=f"#c{number}", class_="jump", data_position=position)


def _worst_table(runs: Sequence[ReportRun], completions: Mapping[int, Shown]) -> Html:
    rows: list[list[str]] = []
    for number, position in worst_tokens(completions, most=WORST):
        entry = completions[number]
        completion, ratio = entry.completion, entry.ratios[position]
        read = runs[entry.run].read
        texts = [shown(read(str(token)), longest=NARROW).replace("\n", "") for token in completion.tokens]
        rows.append(
            [
                element("code", texts[position], class_=shade(ratio)),
                signed(ratio),
                probability(completion.policy[position]),
                probability(completion.policy[position] - ratio),
                _context(texts, position, shade(ratio)),
                *([runs[entry.run].name] if len(runs) > 1 else []),
                jump(entry, number, position),
            ]
        )
    if not rows:
        return element("p", "No token here has a log-ratio other than 0.", class_="missing")
    against = " or ".join(sorted({entry.against for entry in completions.values() if entry.against}))
    run = ["run"] if len(runs) > 1 else []
    headings = ["token", "log-ratio", "policy", against, "in context", *run, "where"]
    table = plain_table(headings, rows, caption="tokens with the largest |log-ratio| on this page", classes="worst")
    return join([element("h3", "Worst tokens", id="worst-tokens"), table])


def _context(texts: Sequence[str], position: int, shade: str) -> Html:
    first, end = max(0, position - BEFORE), position + 1 + AFTER
    before = "…" * (first > 0) + "".join(texts[first:position])
    after = "".join(texts[position + 1 : end]) + "…" * (end < len(texts))
    return element("code", before, element("b", texts[position], class_=shade), after, class_="context")


def _anchor_choice(completions: Sequence[Shown]) -> list[Html]:
    """The choice of the model that the shades compare the policy with, if the record has several."""
    anchors = {anchor for entry in completions for anchor in recorded(entry.completion)}
    names = [(anchor, anchor) for anchor in DISTANCES if anchor in anchors]
    choice = _select("against", "Shades compare the policy with the", names)
    edges = " ".join(map(str, EDGES))
    return [element("div", choice, id="against", data_edges=edges, hidden=True)] if len(names) > 1 else []


def _filters(runs: Sequence[ReportRun], completions: Sequence[Shown]) -> Html:
    steps = [entry.completion.step for entry in completions]
    limits = {"type": "number", "inputmode": "decimal", "min": min(steps), "max": max(steps), "step": 1}
    names = [("", "all runs"), *((str(number), run.name) for number, run in enumerate(runs))]
    blamed = element("input", type="checkbox", id="f-blamed", disabled=not any(entry.blamed for entry in completions))
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


EDGES = (0.1, 0.3, 1.0, 3.0)
"""Sizes of a log-ratio, in nats, at which the shade changes."""
PROMPT = 2000
DISTANCES: Mapping[Anchor, str] = {"reference": "KL", "teacher": "KL to the teacher", "sampler": "mismatch"}
"""What the distance to a model is called on a card."""


def shade(ratio: float) -> str:
    """The shade of a token: z near 0, p1 to p4 if the policy finds it likelier, n1 to n4 if the other model does."""
    level = sum(abs(ratio) >= edge for edge in EDGES)
    return "z" if level == 0 else f"{'p' if ratio > 0 else 'n'}{level}"


def card(entry: Shown, number: int, *, read: Callable[[str], str], label: str) -> Html:
    """A completion on the page, with its facts and the log-probabilities of its tokens."""
    completion, reward = entry.completion, entry.completion.reward
    twins = element("span", f"×{entry.times}", class_="times", title=f"{entry.times} equal completions")
    return element(
        "article",
        element(
            "header",
            element(
                "h4",
                f"Step {completion.step}, completion {entry.index + 1}",
                *([Html(" "), twins] if entry.times > 1 else []),
            ),
            *([element("span", label, class_="run")] if label else []),
            element("dl", *_facts(entry), class_="facts"),
        ),
        element("div", *_prompt(completion.prompt), _strip(entry, read), class_="said"),
        class_="completion",
        id=f"c{number}",
        data_number=number,
        data_run=entry.run,
        data_step=completion.step,
        data_reward=None if reward is None or not math.isfinite(reward) else f"{reward:.6g}",
        data_worst=f"{entry.worst:.6g}",
        data_kl=f"{entry.k3:.6g}",
        data_length=len(completion.tokens),
        data_blamed=bool(entry.blamed),
        data_numbers=_numbers(entry),
    )


def _facts(entry: Shown) -> list[Html]:
    """The facts of a completion as a whole; only the distance that the shades show is visible."""
    completion = entry.completion
    rewards = [("reward", completion.reward), ("advantage", completion.advantage)]
    rows = [_fact(name, short(value)) for name, value in rewards if value is not None]
    for anchor in recorded(completion):
        distance, hidden = entry.towards(anchor), anchor != entry.against
        text, sizes = (
            f"{short(distance.k3)} | {signed(distance.k1)} nats",
            {"kl": f"{distance.k3:.6g}", "worst": f"{distance.worst:.6g}"},
        )
        rows.append(_fact(f"{DISTANCES[anchor]} (k3 | k1)", text, of=anchor, hidden=hidden, **sizes))
        rows.append(_fact("largest", f"{short(distance.worst)} nats", of=anchor, hidden=hidden))
    ending = {True: ", ended", False: ", cut off", None: ""}[completion.ended]
    return [*rows, _fact("length", f"{count(sum(completion.is_sampled), 'token')}{ending}")]


def _fact(name: str, value: str, *, hidden: bool = False, **data: str) -> Html:
    named = {f"data_{key}": datum for key, datum in data.items()}
    return element("div", element("dt", name), element("dd", value), hidden=hidden, **named)


def _prompt(prompt: str) -> list[Html]:
    if not prompt:
        return []
    label = element("span", "prompt ", class_="unseen")
    return [element("p", label, element("span", shorten(prompt, PROMPT), class_="words"), class_="prompt")]


def _strip(entry: Shown, read: Callable[[str], str]) -> Html:
    begin, end = entry.span
    completion = entry.completion
    total = len(completion.tokens)
    note = [element("p", f"Only tokens {begin + 1} to {end} of {total} are shown.", class_="aside")]
    shading = f", shaded by log policy − log {entry.against}" if entry.against else ""
    name = f"Tokens of step {completion.step}, completion {entry.index + 1}{shading}"
    tokens = [_token(entry, position, read) for position in range(begin, end)]
    strip = element("div", *tokens, class_="tokens", role="group", aria_label=name, data_begin=begin)
    return join([strip, *(note if end - begin < total else [])])


def _token(entry: Shown, position: int, read: Callable[[str], str]) -> Html:
    completion, ratio = entry.completion, entry.ratios[position]
    classes = ["u" if math.isnan(ratio) else shade(ratio)]
    if not completion.is_sampled[position]:
        classes.append("q")
    elif not completion.is_trained[position]:
        classes.append("m")
    if position in entry.blamed:
        classes.append("a")
    return element("span", shown(read(str(completion.tokens[position]))), class_=" ".join(classes))


def _numbers(entry: Shown) -> str:
    """The log-probabilities of the tokens, rounded, as JSON: first letter of the model -> values."""
    begin, end = entry.span
    logprobs = {"policy": entry.completion.policy, **recorded(entry.completion)}
    rounded = {
        name[0]: [round(value, 5) if math.isfinite(value) else None for value in values[begin:end]]
        for name, values in logprobs.items()
    }
    return json.dumps(rounded, separators=(",", ":"))


def legend(against: Sequence[str]) -> Html:
    """The explanation of the shades."""
    other = element("span", " or ".join(against) or MISSING, class_="other")
    levels = range(len(EDGES), 0, -1)
    swatches = [(f"n{level}", f"−{EDGES[level - 1]:g}") for level in levels] + [("z", "0")]
    swatches += [(f"p{level}", f"+{EDGES[level - 1]:g}") for level in reversed(levels)]
    steps = [element("span", text, class_=f"swatch {name}") for name, text in swatches]
    ends = [element("span", *words, class_="end") for words in ((other, " likelier"), ("policy likelier",))]
    marks = {"u m": "not trained on", "u q": "prompt, or a tool's answer"}
    marks |= {"z a": "blamed by an alarm", "u": "no number"}
    samples = [
        element("span", element("span", "token", class_=f"sample {classes}"), f" {text}", class_="mark")
        for classes, text in marks.items()
    ]
    return element(
        "div",
        element("p", "log policy − log ", other, ", in nats", class_="what"),
        element("p", ends[0], *steps, ends[1], class_="scale"),
        element("p", *samples, class_="marks"),
        class_="shades",
    )
