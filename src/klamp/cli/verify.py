"""`klamp verify`: klamp's claims, proven on this machine; `klamp explain`: what a KL term does, measured likewise."""

from __future__ import annotations

import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from klamp.cli.arguments import config_of, with_file
from klamp.cli.commands import ExplainOptions, VerifyOptions, read_command
from klamp.cli.text import FAILED, WIDTH, say, show_paragraph, show_table
from klamp.config import PRESETS, find_preset
from klamp.errors import ConfigError, KLWarning, unknown_name
from klamp.lab.tasks.base import NO_REWARD
from klamp.verify.convergence import answer_convergence
from klamp.verify.direction import answer_direction
from klamp.verify.explain import Setting, explain_config
from klamp.verify.judge import FORMS, Explanation, explain_form
from klamp.verify.proofs import PROOFS, Check, run_section
from klamp.verify.proofs.check import ProvenAnswer
from klamp.verify.proofs.values import measure_estimators

QUESTIONS = {"direction": answer_direction, "convergence": answer_convergence}
LENGTH = 1000
"""Completion length in tokens where neither a flag nor the configuration says one."""


def run(argv: Sequence[str]) -> int:
    """Run every proof, or answer one question; 1 where a check fails."""
    options: VerifyOptions = read_command("verify", argv)[0]
    started = time.perf_counter()
    checks = show_proofs() if options.question is None else show_answer(QUESTIONS[options.question]())
    failed = [check for check in checks if not check.passed]
    say()
    if not failed:
        say(f"{len(checks)} of {len(checks)} checks passed, in {time.perf_counter() - started:.1f} s")
        return 0
    say(f"{len(failed)} of {len(checks)} checks FAILED:")
    for check in failed:
        say(f"  {check.section}: {check.claim}: {_measured(check)}")
    return FAILED


def show_proofs() -> list[Check]:
    """Run every proof and print it, section by section; returns the checks."""
    headings = ("estimator", "per token", "value", "deviation/KL", "as a loss it follows", "in the reward it follows")
    rows = [
        (x.name, x.formula, x.bias_text, f"{x.deviation:.2f}", x.as_loss.in_words, x.in_reward.in_words)
        for x in measure_estimators()
    ]
    show_table("the estimators, tokens of the policy", headings, rows)
    checks: list[Check] = []
    for section, proof in PROOFS.items():
        results = run_section(section, proof)
        say()
        show_checks(results, section)
        checks += results
    return checks


def show_answer(answer: ProvenAnswer) -> Sequence[Check]:
    """Print the tables and the checks of a question; returns the checks."""
    say(f"{answer.question}\n")
    for table in answer.tables:
        show_table(table.title, table.columns, table.rows)
        say()
    show_checks(answer.checks, "what this rests on")
    say()
    for paragraph in answer.words if answer.passed else ():
        show_paragraph(paragraph, width=0)
    return answer.checks


def show_checks(checks: Sequence[Check], title: str) -> None:
    """Print checks: ok with what was measured, or FAIL with what was expected."""
    rows = [("ok" if check.passed else "FAIL", check.claim, _measured(check)) for check in checks]
    show_table(title, ("", "", ""), rows)


def _measured(check: Check) -> str:
    return check.measured if check.passed else f"expected {check.expected}, got {check.measured}"


def run_explain(argv: Sequence[str]) -> int:
    """Run `klamp explain` and return its exit code."""
    for index, explanation in enumerate(explain(argv)):
        if index:
            say()
        say(textwrap.fill(f"{explanation.name}: {explanation.verdict}", WIDTH))
        for label, text in (*explanation.lines, *(("caution", caution) for caution in explanation.cautions)):
            show_paragraph(text, label=label)
    return 0


def explain(argv: Sequence[str]) -> list[Explanation]:
    """The explanations that a command line asks for; without a name, one of its flags alone."""
    options, flags = read_command("explain", argv)
    return [_explain(options, name, flags) for name in options.names or ("these flags",)]


def _explain(options: ExplainOptions, name: str, flags: Mapping[str, Any]) -> Explanation:
    if name in FORMS and flags:  # some are presets, too
        why, fix = "it is explained as printed", "klamp explain --preset NAME ... for a configuration"
        raise ConfigError("a printed form takes no flags", got=f"{name}, {', '.join(flags)}", why=why, fix=fix)
    if name in FORMS:
        return explain_form(name)
    if name.endswith((".yaml", ".yml")):
        options = replace(options, config=options.config or name)
    elif name in PRESETS:
        options = replace(options, preset=options.preset or name)
    elif options.names:
        why = "it is no preset, no printed form, no .yaml"
        raise unknown_name("preset, printed form or file", name, {*PRESETS, *FORMS}, why=why)
    with warnings.catch_warnings(action="ignore", category=KLWarning):  # the explanation has the caution
        values = with_file(options, flags)
        config, preset, longest = config_of(values), values.get("preset"), values.get("max_completion_length")
        setting = Setting(
            length=options.length or config.kl.kl_reference_length or longest or LENGTH,
            max_length=longest,
            group_size=config.rollout.num_generations,
            paper=find_preset(preset).paper if preset else "",
            rewarded=config.task.reward != NO_REWARD,
            updates=config.optim.num_iterations,
        )
        return explain_config(config.kl, config.loss, name=name, setting=setting, teacher=config.teacher)
