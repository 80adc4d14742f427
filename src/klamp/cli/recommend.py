"""`klamp recommend`: a configuration to begin with, its price, and for each field the reason and its record."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

import yaml

from klamp.cli.flags import read_options
from klamp.cli.options import RecommendOptions
from klamp.cli.output_file import check_output, write_output
from klamp.cli.tables import WIDTH
from klamp.config.choices import SMALL_VOCABULARY
from klamp.config.recommend import Recommendation, recommend
from klamp.config.situation import Situation
from klamp.training.config import TrainConfig

MARK = "# klamp recommend"
"""How the text begins, and so every file of it."""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp recommend` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `recommend`.
        stream: where the text goes; None: stdout.

    Raises:
        KlampError: a flag that cannot be used, a file that would be lost; the caller shows it.
    """
    out = sys.stdout if stream is None else stream
    options = read_options(RecommendOptions, argv, command="klamp recommend")
    if options.output is not None:
        check_output(
            options.output,
            example="mine.yaml",
            refused="the file exists and is no recommendation",
            is_one=lambda text: text.startswith((MARK, '{\n  "command": "klamp recommend')),
        )
    found = recommend(situation_of(options))
    TrainConfig.from_flat(found.values)  # what is recommended can be trained
    asked = shlex.join(["klamp", "recommend", *argv])
    text = as_json(found, asked) if options.json else as_yaml(found, asked)
    if options.output is None:
        print(text, end="", file=out, flush=True)
        return 0
    write_output(options.output, text, what="the recommendation")
    name = shlex.quote(str(options.output))
    print(f"{options.output}: {len(found.choices)} fields; klamp train --config {name}", file=out, flush=True)
    return 0


def situation_of(options: RecommendOptions) -> Situation:
    """The situation that the flags describe.

    Raises:
        ConfigError: lengths or a range that cannot be.
    """
    return Situation(
        length=options.length,
        max_length=options.max_length,
        group_size=options.group_size,
        updates=options.updates,
        gamed=options.verifier == "model",
        keeps=options.keep == "skills",
        reward_range=options.reward_range,
        lags=options.engine,
        ends_where_beta_says=options.exact_optimum,
        steady_length=options.steady_length,
        free_kl=options.free_kl,
        small_vocabulary=options.vocab <= SMALL_VOCABULARY,
        low_precision=options.low_precision,
    )


def as_yaml(found: Recommendation, asked: str) -> str:
    """The recommendation as the lines of a file for `klamp train --config`, its reasons as comments.

    Args:
        found: the recommendation.
        asked: the command that it answers.
    """
    lines = [f"# {asked}"]
    lines += _comment(f"Price of beta: {found.price}." if found.price else "No KL, and no price.")
    for text in found.cautions:
        lines += _comment(f"Caution: {text}")
    for name, choice in found.choices.items():
        rests = f" [{', '.join(choice.rests_on)}]" if choice.rests_on else ""
        computed = f"; computed: {choice.computed}" if choice.computed else ""
        lines += ["", *_comment(f"{choice.reason}{computed}{rests}"), yaml.safe_dump({name: choice.value}).strip()]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def as_json(found: Recommendation, asked: str) -> str:
    """The recommendation as a JSON object: configuration, reasons, price, cautions.

    Args:
        found: the recommendation.
        asked: the command that it answers.
    """
    reasons: dict[str, Any] = {
        name: {"reason": choice.reason, "computed": choice.computed, "rests_on": list(choice.rests_on)}
        for name, choice in found.choices.items()
    }
    whole = {
        "command": asked,
        "config": found.values,
        "reasons": reasons,
        "price": found.price,
        "cautions": list(found.cautions),
    }
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
