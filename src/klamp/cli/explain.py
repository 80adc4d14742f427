"""`klamp explain CONFIG`: what a KL term does, in plain words, every number measured by enumeration."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from klamp.cli.arguments import TrainRequest, parse_train
from klamp.cli.flags import every_flag, field_name, split_flags, unknown_key
from klamp.cli.tables import WIDTH, show_paragraph
from klamp.config import PRESETS, find_preset
from klamp.config.presets import OLD_NAMES, speaking_name
from klamp.errors import ConfigError, KLWarning, UnknownNameError, unknown_name
from klamp.verify.explain import VOCAB, Explanation, Setting, explain_config
from klamp.verify.explain_printed import explain_form
from klamp.verify.printed import FORMS

LENGTH = 1000
"""Completion length in tokens where nothing says one."""
OWN = ("length", "vocab")
"""Flags of the command itself."""

HELP = f"""\
usage: klamp explain CONFIG [CONFIG ...] [flags]

Says what a KL term does: which divergence it pulls towards, which share of the sequence's gradient it keeps, where it
clips, its units, its cost, its cautions. Nothing is loaded or trained; gradients are measured by enumeration.

CONFIG is
  a preset          {", ".join(name for name in PRESETS if name not in FORMS)}
  a printed form    {", ".join(FORMS)}
  a YAML file       as `klamp train --config` takes it
  or flags          those of `klamp train`: klamp explain --kl_estimator k3 --kl_gradient own --beta 0.04

flags:
  --length N        expected completion length in tokens, for units and budgets; default: kl_reference_length,
                    max_completion_length where it is given, else {LENGTH:,}
  --vocab N         vocabulary entries of the model, for the memory of logits ({VOCAB:,})
"""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """What a command line asks for."""

    names: tuple[str, ...]
    """Presets, printed forms and files, in their order."""
    flags: tuple[str, ...]
    """The flags of `klamp train`, as they were written."""
    length: int | None = None
    """Expected length."""
    vocab: int = VOCAB
    """Vocabulary entries."""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp explain` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `explain`.
        stream: where the text goes; None: stdout.

    Raises:
        KlampError: a name, file or flag that cannot be used; the caller shows it.
    """
    out = sys.stdout if stream is None else stream
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP, file=out, end="")
        return 0
    for index, explanation in enumerate(explain(read_request(argv))):
        if index:
            print(file=out)
        show_explanation(explanation, out)
    return 0


def read_request(argv: Sequence[str]) -> ExplainRequest:
    """What a command line asks for.

    Raises:
        ConfigError: a length or vocabulary that is no number.
    """
    words = list(argv)
    names: list[str] = []
    while words and not words[0].startswith("--"):
        names.append(words.pop(0))
    flags: list[str] = []
    own: dict[str, int] = {}
    for flag, values in split_flags(words):
        if field_name(flag) in OWN:
            own[field_name(flag)] = _count(flag, values)
        elif f"--{field_name(flag)}" not in every_flag():
            known = every_flag() | {f"--{name}" for name in OWN}
            why = "neither klamp explain nor klamp train has it"
            raise unknown_key("flag", flag, known, why=why, command="klamp explain")
        else:
            flags += [flag, *values]
    return ExplainRequest(names=tuple(names), flags=tuple(flags), **own)


def explain(request: ExplainRequest) -> list[Explanation]:
    """The explanations that a request asks for; without a name, that of the flags alone.

    Raises:
        UnknownNameError: no such preset, form, flag or choice; names the nearest.
        ConfigError: a combination that cannot work.
    """
    if not request.names:
        return [_explain_flags(request, "these flags", [])]
    return [_explain_name(request, name) for name in request.names]


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
    if name.endswith((".yaml", ".yml")):
        return _explain_flags(request, name, ["--config", name])
    if name not in PRESETS:
        raise _unknown(name)
    return _explain_flags(request, name, ["--preset", name])


def _explain_flags(request: ExplainRequest, name: str, source: list[str]) -> Explanation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # the explanation says the same, in its place
        parsed = parse_train([*source, *request.flags])
        paper = find_preset(parsed.options.preset).paper if parsed.options.preset else ""
        setting = Setting(length=_length(request, parsed), vocab=request.vocab, paper=paper)
        return explain_config(parsed.config.kl, parsed.config.loss, name=name, setting=setting)


def _length(request: ExplainRequest, parsed: TrainRequest) -> int:
    if request.length is not None:
        return request.length
    if parsed.config.kl.kl_reference_length is not None:
        return parsed.config.kl.kl_reference_length
    return parsed.config.rollout.max_completion_length if "max_completion_length" in parsed.sources else LENGTH


def _unknown(name: str) -> UnknownNameError:
    known = {*PRESETS, *FORMS, *OLD_NAMES}
    return unknown_name("preset, printed form or file", name, known, why="it is no preset, no printed form, no .yaml")


def _count(flag: str, values: Sequence[str]) -> int:
    try:
        (text,) = values
        count = int(text)
        if count < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{flag} cannot be read", got=" ".join(values) or "no value", why="it takes a whole number of 1 or more"
        ) from None
    return count
