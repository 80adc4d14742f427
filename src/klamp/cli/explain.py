"""`klamp explain CONFIG`: what a KL term does, in words, every number measured by enumeration."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from klamp.cli.arguments import TrainRequest, apart, request_of
from klamp.cli.flags import fields_of, read_argv, train_fields
from klamp.cli.options import ExplainOptions
from klamp.cli.text import WIDTH, show_paragraph
from klamp.config import PRESETS, find_preset
from klamp.config.presets import OLD_NAMES, speaking_name
from klamp.errors import ConfigError, KLWarning, unknown_name
from klamp.verify.explain import Explanation, Setting, explain_config
from klamp.verify.printed_formulas import FORMS, explain_form

LENGTH = 1000
"""Completion length in tokens where neither a flag nor the configuration says one."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """What a command line of `klamp explain` asks for."""

    options: ExplainOptions
    """The options of `klamp explain` itself."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Field of `klamp train` -> its value, where a flag says one."""


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
    given = read_argv(train_fields() | fields_of(ExplainOptions), argv, command="klamp explain")
    own, flags = apart(given, ExplainOptions)
    return ExplainRequest(options=ExplainOptions(**own), flags=flags)


def explain(request: ExplainRequest) -> list[Explanation]:
    """The explanations that a request asks for; without a name, that of the flags alone.

    Raises:
        UnknownNameError: no such preset, form, flag or choice; names the nearest.
        ConfigError: a combination that cannot work.
    """
    if not request.options.names:
        return [_explain_flags(request, "these flags", {})]
    return [_explain_name(request, name) for name in request.options.names]


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
                got=f"{name} {' '.join(f'--{flag}' for flag in request.flags)}",
                why="it is explained as it is printed",
                fix="klamp explain --preset recommended ... for a configuration",
            )
        return explain_form(name)
    return _explain_flags(request, name, _source(name))


def _source(name: str) -> dict[str, str]:
    """The flag that takes a configuration by its name."""
    if name.endswith((".yaml", ".yml")):
        return {"config": name}
    if name not in PRESETS:
        known = {*PRESETS, *FORMS, *OLD_NAMES}
        why = "it is no preset, no printed form, no .yaml"
        raise unknown_name("preset, printed form or file", name, known, why=why)
    return {"preset": name}


def _explain_flags(request: ExplainRequest, name: str, source: Mapping[str, str]) -> Explanation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # the explanation says the same, in its place
        parsed = request_of({**source, **request.flags})
    paper = find_preset(parsed.options.preset).paper if parsed.options.preset else ""
    setting = Setting(
        length=_length(request, parsed),
        max_length=parsed.config.rollout.max_completion_length if "max_completion_length" in parsed.given else None,
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
    return parsed.config.rollout.max_completion_length if "max_completion_length" in parsed.given else LENGTH
