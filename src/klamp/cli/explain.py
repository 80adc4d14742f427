"""`klamp explain CONFIG`: what a KL term does, in words, every number measured by enumeration; or how two differ."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from klamp.cli.arguments import TrainRequest, parse_train
from klamp.cli.flags import fields_of, read_own
from klamp.cli.options import ExplainOptions
from klamp.cli.tables import WIDTH, show_paragraph, show_table
from klamp.cli.train_fields import every_flag
from klamp.config import PRESETS, find_preset
from klamp.config.presets import OLD_NAMES, speaking_name
from klamp.errors import ConfigError, KLWarning, UnknownNameError, unknown_name, without_credentials
from klamp.verify.explain import Explanation, Line, Setting, explain_config
from klamp.verify.printed_formulas import FORMS, explain_form

LENGTH = 1000
"""Completion length in tokens where neither a flag nor the configuration says one."""
IN_NUMBERS = ("price", "noise", "control")
"""What a comparison says in its tables already."""
EQUAL = 1e-6
"""Relative difference up to which two measured numbers are the same."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """What a command line of `klamp explain` asks for."""

    options: ExplainOptions
    """The options of `klamp explain` itself."""
    flags: tuple[str, ...] = ()
    """The flags of `klamp train`, as they were written."""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp explain` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `explain`.
        stream: where the text goes; None: stdout.

    Raises:
        KlampError: a name, file or flag that cannot be used; the caller shows it.
    """
    out = sys.stdout if stream is None else stream
    request = read_request(argv)
    if len(request.options.names) == 2 and not any(speaking_name(name) in FORMS for name in request.options.names):
        _compare(request, out)
        return 0
    for index, explanation in enumerate(explain(request)):
        if index:
            print(file=out)
        show_explanation(explanation, out)
    return 0


def read_request(argv: Sequence[str]) -> ExplainRequest:
    """What a command line of `klamp explain` asks for.

    Raises:
        UnknownNameError: a flag of neither this command nor klamp train; names the nearest.
        ConfigError: a length or vocabulary that is no number.
    """
    given, others = read_own(fields_of(ExplainOptions), argv, command="klamp explain", others=every_flag())
    flags = [word for flag, texts in others for word in (flag, *texts)]
    return ExplainRequest(options=ExplainOptions(**given), flags=tuple(flags))


def explain(request: ExplainRequest) -> list[Explanation]:
    """The explanations that a request asks for; without a name, that of the flags alone.

    Raises:
        UnknownNameError: no such preset, form, flag or choice; names the nearest.
        ConfigError: a combination that cannot work.
    """
    if not request.options.names:
        return [_explain_flags(request, "these flags", [])]
    return [_explain_name(request, name) for name in request.options.names]


def _compare(request: ExplainRequest, out: TextIO) -> None:
    """Print what two configurations set and do differently.

    Raises:
        UnknownNameError: no such preset, flag or choice; names the nearest.
        ConfigError: a combination that cannot work, a file that cannot be read.
    """
    names = request.options.names
    one, other = (_parsed(request, _source(name)).config.flat() for name in names)
    fields = [(field, one[field], other[field]) for field in one if one[field] != other[field]]
    first, second = (_explain_name(request, name) for name in names)
    verdict = f"{first.name}: {first.verdict} {second.name}: {second.verdict}"
    if first.verdict == second.verdict:
        verdict = f"Both do the same: {first.verdict}"
    print(textwrap.fill(f"{names[0]} against {names[1]}. {verdict}", WIDTH) + "\n", file=out)
    if fields:
        shown = [(field, *map(_written, values)) for field, *values in fields]
        show_table(out, "what is set differently", ("", *names), shown)
    else:
        print("no field is set differently", file=out)
    print(file=out)
    numbers = dict.fromkeys([*first.numbers, *second.numbers])
    if numbers:
        rows = [_number_row(name, first.numbers.get(name), second.numbers.get(name)) for name in numbers]
        show_table(out, "in numbers", ("", *names, "ratio"), rows)
        print(file=out)
    _show_words(first, second, out)


def _show_words(first: Explanation, second: Explanation, out: TextIO) -> None:
    """Print what is said of one configuration and not of the other, and under which labels both say the same."""
    words = _by_label(first.lines), _by_label(second.lines)
    labels = list(dict.fromkeys([*words[0], *words[1]]))
    same = [label for label in labels if words[0].get(label) == words[1].get(label)]
    for label in (each for each in labels if each not in (*same, *IN_NUMBERS)):
        show_paragraph(out, f"{first.name}: {words[0].get(label, '-')}", label=label)
        show_paragraph(out, f"{second.name}: {words[1].get(label, '-')}", label="")
    for one, other in ((first, second), (second, first)):
        for caution in (text for text in one.cautions if text not in other.cautions):
            show_paragraph(out, f"{one.name}: {caution}", label="caution")
    if same:
        show_paragraph(out, f"{', '.join(same)} (see klamp explain {first.name})", label="the same")


def _by_label(lines: Iterable[Line]) -> dict[str, str]:
    """Label -> its text; lines without a label go on with the one before."""
    found: dict[str, str] = {}
    label = ""
    for name, text in lines:
        label = name or label
        found[label] = f"{found[label]}; {text}" if label in found else text
    return found


def _written(value: object) -> str:
    """The value of a field as it stands in a table."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return without_credentials(str(value))


def _number_row(name: str, one: float | None, other: float | None) -> tuple[str, str, str, str]:
    ratio = ""
    if one and other and one * other > 0:
        same = abs(one - other) <= EQUAL * max(abs(one), abs(other))
        ratio = "the same" if same else f"{other / one:.3g}"
    first, second = ("-" if value is None else f"{round(value, 9):.4g}" for value in (one, other))
    return name, first, second, ratio


def show_explanation(explanation: Explanation, stream: TextIO) -> None:
    """Print an explanation: the verdict, the facts, the cautions."""
    print(textwrap.fill(f"{explanation.name}: {explanation.verdict}", WIDTH), file=stream)
    for label, text in explanation.lines:
        show_paragraph(stream, text, label=label)
    for caution in explanation.cautions:
        show_paragraph(stream, caution, label="caution")


def _explain_name(request: ExplainRequest, name: str) -> Explanation:
    if speaking_name(name) in FORMS:
        if request.flags:
            raise ConfigError(
                "a printed form takes no flags",
                got=f"{name} {' '.join(request.flags)}",
                why="it is explained as it is printed",
                fix="klamp explain --preset recommended ... for a configuration",
            )
        return explain_form(name)
    return _explain_flags(request, name, _source(name))


def _source(name: str) -> list[str]:
    """The flag that takes a configuration by its name."""
    if name.endswith((".yaml", ".yml")):
        return ["--config", name]
    if name not in PRESETS:
        raise _unknown(name)
    return ["--preset", name]


def _parsed(request: ExplainRequest, source: list[str]) -> TrainRequest:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # the explanation says the same, in its place
        return parse_train([*source, *request.flags])


def _explain_flags(request: ExplainRequest, name: str, source: list[str]) -> Explanation:
    parsed = _parsed(request, source)
    paper = find_preset(parsed.options.preset).paper if parsed.options.preset else ""
    setting = Setting(
        length=_length(request, parsed),
        max_length=parsed.config.rollout.max_completion_length if "max_completion_length" in parsed.sources else None,
        group_size=parsed.config.rollout.num_generations,
        vocab=request.options.vocab,
        paper=paper,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return explain_config(parsed.config.kl, parsed.config.loss, name=name, setting=setting)


def _length(request: ExplainRequest, parsed: TrainRequest) -> int:
    if request.options.length is not None:
        return request.options.length
    if parsed.config.kl.kl_reference_length is not None:
        return parsed.config.kl.kl_reference_length
    return parsed.config.rollout.max_completion_length if "max_completion_length" in parsed.sources else LENGTH


def _unknown(name: str) -> UnknownNameError:
    known = {*PRESETS, *FORMS, *OLD_NAMES}
    return unknown_name("preset, printed form or file", name, known, why="it is no preset, no printed form, no .yaml")
