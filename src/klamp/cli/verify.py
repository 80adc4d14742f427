"""`klamp verify`: klamp's claims, proven on this machine; exit code 1 if one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from klamp.cli.flags import read_options
from klamp.cli.options import VerifyOptions
from klamp.cli.text import FAILED, say, show_paragraph, show_table
from klamp.verify.convergence import answer_convergence
from klamp.verify.direction import answer_direction
from klamp.verify.proofs import PROOFS, Check, run_section
from klamp.verify.proofs.check import Answer
from klamp.verify.proofs.values import EstimatorFacts, measure_estimators

QUESTIONS: dict[str, Callable[[], Answer]] = {"direction": answer_direction, "convergence": answer_convergence}


def run(argv: Sequence[str]) -> int:
    """Run every proof, or answer one question; 1 where a check fails."""
    options = read_options(VerifyOptions, argv, command="klamp verify")
    started = time.perf_counter()
    checks = show_proofs() if options.question is None else show_answer(QUESTIONS[options.question]())
    return conclude(checks, time.perf_counter() - started)


def show_proofs() -> list[Check]:
    """Run every proof and print it, section by section; returns the checks."""
    headings = ("estimator", "per token", "value", "deviation/KL", "as a loss it follows", "in the reward it follows")
    show_table("the estimators, tokens of the policy", headings, [_cells(each) for each in measure_estimators()])
    checks: list[Check] = []
    for section, proof in PROOFS.items():
        found = run_section(section, proof)
        say()
        show_checks(found, section)
        checks += found
    return checks


def show_answer(answer: Answer) -> list[Check]:
    """Print an answered question; returns its checks."""
    say(f"{answer.question}\n")
    for table in answer.tables:
        show_table(table.title, table.columns, table.rows)
        say()
    show_checks(answer.checks, "what this rests on")
    say()
    if answer.passed:
        for paragraph in answer.words:
            show_paragraph(paragraph, width=0)
    return list(answer.checks)


def show_checks(checks: Sequence[Check], title: str) -> None:
    """Print checks: ok with what was measured, or FAIL with what was expected."""
    rows = [
        ("ok" if check.passed else "FAIL", check.claim, check.measured if check.passed else _failure(check))
        for check in checks
    ]
    show_table(title, ("", "", ""), rows)


def conclude(checks: Sequence[Check], seconds: float) -> int:
    """Print how many checks passed; returns the exit code."""
    failed = [check for check in checks if not check.passed]
    say()
    if not failed:
        say(f"{len(checks)} of {len(checks)} checks passed, in {seconds:.1f} s")
        return 0
    say(f"{len(failed)} of {len(checks)} checks FAILED:")
    for check in failed:
        section = f"{check.section}: " if check.section else ""
        say(f"  {section}{check.claim}: {_failure(check)}")
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
