"""A completion with each token shaded by its log-ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klamp.report.completions import Anchor, Shown, recorded
from klamp.report.text import MISSING, Html, count, element, join, short, shorten, shown, signed

EDGES = (0.1, 0.3, 1.0, 3.0)
"""Sizes of a log-ratio, in nats, at which the shade changes."""
PROMPT = 2000
"""The most characters of a prompt that are shown."""
DISTANCES: Mapping[Anchor, str] = {"reference": "KL", "teacher": "KL to the teacher", "sampler": "mismatch"}
"""What the distance to a model is called on a card."""


def shade(ratio: float) -> str:
    """The shade of a token: z near 0, p1 to p4 where the policy finds it likelier, n1 to n4 where the other does."""
    level = sum(abs(ratio) >= edge for edge in EDGES)
    return "z" if level == 0 else f"{'p' if ratio > 0 else 'n'}{level}"


def card(each: Shown, number: int, *, read: Callable[[str], str], label: str, linked: frozenset[int]) -> Html:
    """A completion on the page, with what is known of it.

    Args:
        each: the completion.
        number: its number on the page.
        read: turns its tokens into text.
        label: the name of its run; empty where there is only one.
        linked: positions that something on the page links to.
    """
    completion = each.completion
    heading = f"Step {completion.step}, completion {each.index + 1}"
    twins = [element("span", f"×{each.times}", class_="times", title=f"{each.times} completions are the same")]
    return element(
        "article",
        element(
            "header",
            element("h4", heading, *([Html(" "), *twins] if each.times > 1 else [])),
            *([element("span", label, class_="run")] if label else []),
            element("dl", *facts(each), class_="facts"),
        ),
        element("div", *_prompt(completion.prompt), _strip(each, number, read, linked), class_="said"),
        class_="completion",
        id=f"c{number}",
        data_number=number,
        data_run=each.run,
        data_step=completion.step,
        data_reward=_plain(completion.reward),
        data_worst=f"{each.worst:.6g}",
        data_kl=f"{each.k3:.6g}",
        data_length=len(completion.tokens),
        data_blamed=bool(each.blamed),
    )


def facts(each: Shown) -> list[Html]:
    """What is known of a completion as a whole; of the distances only the one that its shades are about is seen."""
    completion = each.completion
    found = [("reward", completion.reward), ("advantage", completion.advantage)]
    rows = [_fact(name, short(value)) for name, value in found if value is not None]
    for anchor in recorded(completion):
        one, hidden = each.towards(anchor), anchor != each.against
        text, sizes = f"{short(one.k3)} | {signed(one.k1)} nats", {"kl": f"{one.k3:.6g}", "worst": f"{one.worst:.6g}"}
        rows.append(_fact(f"{DISTANCES[anchor]} (k3 | k1)", text, of=anchor, hidden=hidden, **sizes))
        rows.append(_fact("largest", f"{short(one.worst)} nats", of=anchor, hidden=hidden))
    written = sum(completion.is_sampled)
    ending = {True: ", ended", False: ", cut off", None: ""}[completion.ended]
    return [*rows, _fact("length", f"{count(written, 'token')}{ending}")]


def _fact(name: str, value: str, *, hidden: bool = False, **data: str) -> Html:
    named = {f"data_{key}": each for key, each in data.items()}
    return element("div", element("dt", name), element("dd", value), hidden=hidden, **named)


def _prompt(prompt: str) -> list[Html]:
    if not prompt:
        return []
    label = element("span", "prompt ", class_="unseen")
    return [element("p", label, element("span", shorten(prompt, PROMPT), class_="words"), class_="prompt")]


def _strip(each: Shown, number: int, read: Callable[[str], str], linked: frozenset[int]) -> Html:
    begin, end = each.span
    completion = each.completion
    tokens = [_token(each, number, position, read, position in linked) for position in range(begin, end)]
    total = len(completion.tokens)
    left_out = [element("p", f"Only tokens {begin + 1} to {end} of {total} are shown.", class_="aside")]
    whose = f", shaded by log policy − log {each.against}" if each.against else ""
    name = f"Tokens of step {completion.step}, completion {each.index + 1}{whose}"
    strip = element("div", *tokens, class_="tokens", role="group", aria_label=name, data_begin=begin)
    return join([strip, *(left_out if end - begin < total else [])])


def _token(each: Shown, number: int, position: int, read: Callable[[str], str], linked: bool) -> Html:
    completion, ratio = each.completion, each.ratios[position]
    classes = ["u" if math.isnan(ratio) else shade(ratio)]
    if not completion.is_sampled[position]:
        classes.append("q")
    elif not completion.is_trained[position]:
        classes.append("m")
    if position in each.blamed:
        classes.append("a")
    return element(
        "span",
        shown(read(str(completion.tokens[position]))),
        class_=" ".join(classes),
        id=f"c{number}-{position}" if linked else None,
    )


def numbers_of(each: Shown) -> dict[str, Any]:
    """The log-probabilities of a completion's tokens, rounded, for the script of the page."""
    begin, end = each.span
    completion = each.completion
    every = {"policy": completion.policy, **recorded(completion)}
    return {name[0]: _rounded(values[begin:end]) for name, values in every.items()}


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 5) if math.isfinite(value) else None for value in values]


def _plain(value: float | None) -> str | None:
    return None if value is None or not math.isfinite(value) else f"{value:.6g}"


def legend(against: Sequence[str]) -> Html:
    """The explanation of the shades.

    Args:
        against: whose log-probabilities the policy's are compared with, over the page.
    """
    other = element("span", " or ".join(against) or MISSING, class_="other")
    steps = [element("span", text, class_=f"swatch {name}") for name, text in _swatches()]
    marks = [
        ("u m", "token", "not trained on"),
        ("u q", "token", "prompt, or a tool's answer"),
        ("z a", "token", "blamed by an alarm"),
        ("u", "token", "no number"),
    ]
    return element(
        "div",
        element("p", "log policy − log ", other, ", in nats", class_="what"),
        element(
            "p",
            element("span", other, " likelier", class_="end"),
            *steps,
            element("span", "policy likelier", class_="end"),
            class_="scale",
        ),
        element(
            "p",
            *(
                element("span", element("span", sample, class_=f"sample {classes}"), f" {text}", class_="mark")
                for classes, sample, text in marks
            ),
            class_="marks",
        ),
        class_="shades",
    )


def _swatches() -> list[tuple[str, str]]:
    low = [(f"n{level}", f"−{EDGES[level - 1]:g}") for level in range(len(EDGES), 0, -1)]
    high = [(f"p{level}", f"+{EDGES[level - 1]:g}") for level in range(1, len(EDGES) + 1)]
    return [*low, ("z", "0"), *high]
