"""`klamp verify`: klamp's claims, proven on this machine; exit code 1 if one of them fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from klamp.cli.errors import FAILED
from klamp.cli.flags import field_name, split_flags, unknown_key
from klamp.cli.tables import show_paragraph, show_table
from klamp.cli.verify_options import Options
from klamp.errors import ConfigError, unknown_name
from klamp.verify.answers import Answer, answer_direction
from klamp.verify.answers_sampling import answer_importance_sampling
from klamp.verify.estimator_facts import EstimatorFacts, measure_estimators
from klamp.verify.proofs import PROOFS, Check, run_section

QUESTIONS = {"direction": answer_direction, "importance-sampling": answer_importance_sampling}
STYLES = {"ok": "green", "FAIL": "bold red"}
NUMBERS: dict[str, Callable[[str], float]] = {"samples": int, "seed": int, "noise": float, "tokens": int}
LEAST = {"samples": 1000, "seed": 0, "noise": 0, "tokens": 1}

HELP = """\
usage: klamp verify [QUESTION] [flags]

Proves klamp's claims about values, gradients, placements, clips, controllers and number types by
enumerating small worlds in float64; some seconds on one core. The exit code is 1 if a claim fails.

  klamp verify                       every claim
  klamp verify direction             is GRPO's k3 formula backwards? exact, sampled, reversed side by side
  klamp verify importance-sampling   does it matter whose tokens they are?
  klamp verify --model DIR           the estimators on a real model's own distributions

flags:
  --samples N        draws per sampled number of a question (100,000)
  --seed N           seed of the draws, and of the model's completions (0)
  --model DIR        a causal language model: a folder, a hub id, or builtin
  --ref_model DIR    its reference; without it a copy of the model with noise on its weights
  --noise X          size of that noise, relative to each weight matrix (0.05)
  --prompts FILE     a prompt per line, or JSONL with a field `prompt`; without it a few built-in ones
  --tokens N         tokens to sample per prompt (16)
"""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp verify` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `verify`.
        stream: where the tables go; None: stdout.

    Raises:
        KlampError: wrong flags, a model that cannot be loaded; the caller shows it.
    """
    out = sys.stdout if stream is None else stream
    if "-h" in argv or "--help" in argv:
        print(HELP, file=out, end="")
        return 0
    options = read_options(argv)
    started = time.perf_counter()
    if options.model is not None:
        from klamp.cli.verify_model import answer_model

        checks = show_answer(answer_model(options), out)
    elif options.question is not None:
        checks = show_answer(QUESTIONS[options.question](samples=options.samples, seed=options.seed), out)
    else:
        checks = show_proofs(out)
    return conclude(checks, time.perf_counter() - started, out)


def read_options(argv: Sequence[str]) -> Options:
    """The options that a command line names.

    Raises:
        UnknownNameError: an unknown question or flag; names the nearest.
        ConfigError: a value that cannot be read, or flags that need one another.
    """
    words = list(argv)
    given: dict[str, str | float] = {}
    if words and not words[0].startswith("--"):
        given["question"] = words.pop(0)
        if given["question"] not in QUESTIONS:
            raise unknown_name("question", given["question"], QUESTIONS)
    known = set(Options.__dataclass_fields__) - {"question"}
    for flag, values in split_flags(words, command="klamp verify"):
        name = field_name(flag)
        if name not in known:
            why = "`klamp verify --help` lists them"
            raise unknown_key("flag", flag, {f"--{each}" for each in known}, why=why, command="klamp verify")
        given[name] = _value(flag, name, values)
    lonely = [f"--{name}" for name in ("ref_model", "noise", "prompts", "tokens") if name in given]
    if lonely and "model" not in given:
        raise ConfigError(f"{lonely[0]} needs --model", why="it says how a real model is verified", fix="--model DIR")
    return Options(**given)  # pyright: ignore[reportArgumentType]


def _value(flag: str, name: str, values: Sequence[str]) -> str | float:
    read = NUMBERS.get(name, str)
    try:
        (text,) = values
        value = read(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number", str: "one value"}[read]  # pyright: ignore
        raise ConfigError(
            f"{flag} cannot be read", got=" ".join(values) or "no value", why=f"it takes {kind}"
        ) from None
    if isinstance(value, int | float) and value < LEAST[name]:
        raise ConfigError(f"{flag} is too small", got=value, why=f"it has to be at least {LEAST[name]}")
    return value


def show_proofs(stream: TextIO) -> list[Check]:
    """Run every proof and print it, section by section; returns the checks."""
    headings = ("estimator", "per token", "value", "deviation/KL", "as a loss it follows", "in the reward it follows")
    show_table(
        stream, "the estimators, tokens of the policy", headings, [_cells(each) for each in measure_estimators()]
    )
    checks: list[Check] = []
    for section, proof in PROOFS.items():
        found = run_section(section, proof)
        print(file=stream)
        show_checks(found, section, stream)
        checks += found
    return checks


def show_answer(answer: Answer, stream: TextIO) -> list[Check]:
    """Print an answered question; returns its checks."""
    print(f"{answer.question}\n", file=stream)
    for table in answer.tables:
        show_table(stream, table.title, table.columns, table.rows)
        print(file=stream)
    show_checks(answer.checks, "what this rests on", stream)
    print(file=stream)
    if answer.passed:
        for paragraph in answer.words:
            show_paragraph(stream, paragraph, width=0)
    return list(answer.checks)


def show_checks(checks: Sequence[Check], title: str, stream: TextIO) -> None:
    """Print checks: ok with what was measured, or FAIL with what was expected."""
    rows = [
        ("ok" if check.passed else "FAIL", check.claim, check.measured if check.passed else _failure(check))
        for check in checks
    ]
    show_table(stream, title, ("", "", ""), rows, styles=STYLES)


def conclude(checks: Sequence[Check], seconds: float, stream: TextIO) -> int:
    """Print how many checks passed; returns the exit code."""
    failed = [check for check in checks if not check.passed]
    print(file=stream)
    if not failed:
        print(f"{len(checks)} of {len(checks)} checks passed, in {seconds:.1f} s", file=stream, flush=True)
        return 0
    print(f"{len(failed)} of {len(checks)} checks FAILED:", file=stream)
    for check in failed:
        section = f"{check.section}: " if check.section else ""
        print(f"  {section}{check.claim}: {_failure(check)}", file=stream, flush=True)
    return FAILED


def _failure(check: Check) -> str:
    return f"expected {check.expected}, got {check.measured}"


def _cells(facts: EstimatorFacts) -> tuple[str, ...]:
    return (
        facts.name,
        facts.formula,
        facts.bias_text,
        f"{facts.deviation:.2f}",
        facts.as_loss.in_words,
        facts.in_reward.in_words,
    )
