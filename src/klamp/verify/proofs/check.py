"""One checked claim: what klamp says, what was measured, and whether they agree; and an answer, which rests on some."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from klamp.verify.oracle import IN_WORDS, NOTHING_KNOWN, Truths, name_gradient, say_of

EXACT = 1e-9
"""Largest error, in float64, of what is claimed to be equal."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim, its measurement, and whether they agree."""

    claim: str
    expected: str
    measured: str
    passed: bool
    section: str = ""
    """The part of the proof that it belongs to."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts, ready to be printed."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ProvenAnswer:
    """A question about a formula or a configuration, with numbers, checks and an explanation."""

    question: str
    tables: tuple[TextTable, ...]
    checks: tuple[Check, ...]
    """What the answer rests on, each passed or failed."""
    words: tuple[str, ...]
    """The answer in words, one paragraph each."""

    @property
    def passed(self) -> bool:
        """Whether every check passed; only then may the words be believed."""
        return all(check.passed for check in self.checks)


Proof = Callable[[], list[Check]]


def run_section(section: str, proof: Proof) -> list[Check]:
    """Runs the checks of a section; an exception becomes a failed check."""
    try:
        checks = proof()
    except Exception as error:  # the user sees a row FAIL for any error
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        checks = [Check(claim="the proof runs to its end", expected="no error", measured=text, passed=False)]
    return [dataclasses.replace(check, section=section) for check in checks]


def is_equal(claim: str, measured: float | Tensor, expected: float | Tensor, *, tolerance: float = EXACT) -> Check:
    """A check that two numbers are equal, up to an absolute error."""
    got, want = (x.item() if isinstance(x, Tensor) else float(x) for x in (measured, expected))
    error = abs(got - want)
    return Check(
        claim=claim,
        expected=f"{want:.6g}",
        measured=f"{got:.6g} (error {error:.0e})" if error else f"{got:.6g} (exactly)",
        passed=error <= tolerance,
    )


def is_true(claim: str, condition: bool | Tensor, measured: str, *, expected: str = "yes") -> Check:
    """A check that a statement holds; `measured` shows the numbers behind it."""
    return Check(claim=claim, expected=expected, measured=measured, passed=bool(condition))


def follows(
    claim: str,
    gradients: Sequence[Tensor],
    worlds: Sequence[Truths],
    name: str,
    *,
    factor: float = 1.0,
    anchor: str = "ref",
) -> Check:
    """A check that gradients equal the named divergence's, times a factor, in every world; `anchor`: to whom."""
    followed = name_gradient(gradients, worlds)
    texts = IN_WORDS.get(name, name), followed.in_words
    words, measured = (say_of(anchor, text) for text in texts)
    passed = followed.is_exactly(name, factor=factor, tolerance=EXACT)
    if passed and name != NOTHING_KNOWN:
        targets = [factor * truths[name] for truths in worlds]
        sizes = [truths["reverse"].norm() for truths in worlds]
        errors = [(a - b).norm() / size for a, b, size in zip(gradients, targets, sizes, strict=True)]
        measured += f" (error {max(errors):.0e})"
    return Check(
        claim=claim, expected=words if factor == 1 else f"{factor:.4g} x {words}", measured=measured, passed=passed
    )
