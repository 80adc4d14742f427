"""A completion with each token shaded by its log-ratio."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

from klamp.report.completions import Anchor, Shown, recorded
from klamp.report.text import MISSING, Html, count, element, join, short, shorten, shown, signed

EDGES = (0.1, 0.3, 1.0, 3.0)
"""Sizes of a log-ratio, in nats, at which the shade changes."""
PROMPT = 2000
"""The most characters of a prompt that are shown."""
DISTANCES: Mapping[Anchor, str] = {"reference": "KL", "teacher": "KL to the teacher", "sampler": "mismatch"}
"""What the distance to a model is called on a card."""


def shade(ratio: float) -> str:
    """The shade of a token: z near 0, p1 to p4 if the policy finds it likelier, n1 to n4 if the other model does."""
    level = sum(abs(ratio) >= edge for edge in EDGES)
    return "z" if level == 0 else f"{'p' if ratio > 0 else 'n'}{level}"


def card(each: Shown, number: int, *, read: Callable[[str], str], label: str) -> Html:
    """A completion on the page, with its facts and the log-probabilities of its tokens."""
    completion, reward = each.completion, each.completion.reward
    twins = element("span", f"×{each.times}", class_="times", title=f"{each.times} completions are the same")
    return element(
        "article",
        element(
            "header",
            element(
                "h4",
                f"Step {completion.step}, completion {each.index + 1}",
                *([Html(" "), twins] if each.times > 1 else []),
            ),
            *([element("span", label, class_="run")] if label else []),
            element("dl", *_facts(each), class_="facts"),
        ),
        element("div", *_prompt(completion.prompt), _strip(each, read), class_="said"),
        class_="completion",
        id=f"c{number}",
        data_number=number,
        data_run=each.run,
        data_step=completion.step,
        data_reward=None if reward is None or not math.isfinite(reward) else f"{reward:.6g}",
        data_worst=f"{each.worst:.6g}",
        data_kl=f"{each.k3:.6g}",
        data_length=len(completion.tokens),
        data_blamed=bool(each.blamed),
        data_numbers=_numbers(each),
    )


def _facts(each: Shown) -> list[Html]:
    """The facts of a completion as a whole; only the distance that the shades show is visible."""
    completion = each.completion
    rewards = [("reward", completion.reward), ("advantage", completion.advantage)]
    rows = [_fact(name, short(value)) for name, value in rewards if value is not None]
    for anchor in recorded(completion):
        one, hidden = each.towards(anchor), anchor != each.against
        text, sizes = f"{short(one.k3)} | {signed(one.k1)} nats", {"kl": f"{one.k3:.6g}", "worst": f"{one.worst:.6g}"}
        rows.append(_fact(f"{DISTANCES[anchor]} (k3 | k1)", text, of=anchor, hidden=hidden, **sizes))
        rows.append(_fact("largest", f"{short(one.worst)} nats", of=anchor, hidden=hidden))
    ending = {True: ", ended", False: ", cut off", None: ""}[completion.ended]
    return [*rows, _fact("length", f"{count(sum(completion.is_sampled), 'token')}{ending}")]


def _fact(name: str, value: str, *, hidden: bool = False, **data: str) -> Html:
    named = {f"data_{key}": each for key, each in data.items()}
    return element("div", element("dt", name), element("dd", value), hidden=hidden, **named)


def _prompt(prompt: str) -> list[Html]:
    if not prompt:
        return []
    label = element("span", "prompt ", class_="unseen")
    return [element("p", label, element("span", shorten(prompt, PROMPT), class_="words"), class_="prompt")]


def _strip(each: Shown, read: Callable[[str], str]) -> Html:
    begin, end = each.span
    completion = each.completion
    total = len(completion.tokens)
    left_out = [element("p", f"Only tokens {begin + 1} to {end} of {total} are shown.", class_="aside")]
    whose = f", shaded by log policy − log {each.against}" if each.against else ""
    name = f"Tokens of step {completion.step}, completion {each.index + 1}{whose}"
    tokens = [_token(each, position, read) for position in range(begin, end)]
    strip = element("div", *tokens, class_="tokens", role="group", aria_label=name, data_begin=begin)
    return join([strip, *(left_out if end - begin < total else [])])


def _token(each: Shown, position: int, read: Callable[[str], str]) -> Html:
    completion, ratio = each.completion, each.ratios[position]
    classes = ["u" if math.isnan(ratio) else shade(ratio)]
    if not completion.is_sampled[position]:
        classes.append("q")
    elif not completion.is_trained[position]:
        classes.append("m")
    if position in each.blamed:
        classes.append("a")
    return element("span", shown(read(str(completion.tokens[position]))), class_=" ".join(classes))


def _numbers(each: Shown) -> str:
    """The log-probabilities of the tokens, rounded, as JSON: first letter of the model -> values."""
    begin, end = each.span
    every = {"policy": each.completion.policy, **recorded(each.completion)}
    rounded = {
        name[0]: [round(value, 5) if math.isfinite(value) else None for value in values[begin:end]]
        for name, values in every.items()
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
