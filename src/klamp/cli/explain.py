"""`klamp explain CONFIG`: what a KL term does, in words, every number measured by enumeration."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.cli.arguments import apart, request_of
from klamp.cli.flags import fields_of, read_argv, train_fields
from klamp.cli.options import ExplainOptions
from klamp.cli.text import WIDTH, say, show_paragraph
from klamp.config import PRESETS, find_preset
from klamp.errors import ConfigError, KLWarning, unknown_name
from klamp.tasks.base import NO_REWARD
from klamp.verify.explain import FORMS, Explanation, Setting, explain_config, explain_form

LENGTH = 1000
"""Completion length in tokens where neither a flag nor the configuration says one."""


def run(argv: Sequence[str]) -> int:
    """Print what the configurations do."""
    for index, explanation in enumerate(explain(argv)):
        if index:
            say()
        say(textwrap.fill(f"{explanation.name}: {explanation.verdict}", WIDTH))
        for label, text in (*explanation.lines, *(("caution", caution) for caution in explanation.cautions)):
            show_paragraph(text, label=label)
    return 0


def explain(argv: Sequence[str]) -> list[Explanation]:
    """The explanations that a command line asks for; without a name, that of its flags alone."""
    given = read_argv(train_fields() | fields_of(ExplainOptions), argv, command="klamp explain")
    options, flags = apart(given, ExplainOptions)
    return [_explain(options, name, flags) for name in options.names or ("these flags",)]


def _explain(options: ExplainOptions, name: str, flags: Mapping[str, Any]) -> Explanation:
    if name in FORMS and flags:  # some are presets, too
        raise ConfigError(
            "a printed form takes no flags",
            got=f"{name} {' '.join(f'--{flag}' for flag in flags)}",
            why="it is explained as it is printed",
            fix="klamp explain --preset recommended ... for a configuration",
        )
    if name in FORMS:
        return explain_form(name)
    if name.endswith((".yaml", ".yml")):
        flags = {"config": name, **flags}
    elif name in PRESETS:
        flags = {"preset": name, **flags}
    elif options.names:
        why = "it is no preset, no printed form, no .yaml"
        raise unknown_name("preset, printed form or file", name, {*PRESETS, *FORMS}, why=why)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # the explanation says the same, in its place
        asked = request_of(dict(flags))
        config, preset = asked.config, asked.options.preset
        longest = config.rollout.max_completion_length if "max_completion_length" in asked.given else None
        setting = Setting(
            length=options.length or config.kl.kl_reference_length or longest or LENGTH,
            max_length=longest,
            group_size=config.rollout.num_generations,
            paper=find_preset(preset).paper if preset else "",
            rewarded=config.task.reward != NO_REWARD,
            updates=config.optim.num_iterations,
        )
        return explain_config(config.kl, config.loss, name=name, setting=setting, teacher=config.teacher)
