"""A check says what was expected, what was measured, and whether they are the same."""

from __future__ import annotations

import torch

from klamp.verify.oracle import NOTHING_KNOWN, truths
from klamp.verify.proofs.check import follows, is_equal, is_true, run_section
from klamp.verify.worlds import random_chain

CHAIN = random_chain(0)
KNOWN = [truths(CHAIN)]


def test_equal_numbers() -> None:
    assert is_equal("x", 1.0, 1.0).measured == "1 (exactly)"
    assert is_equal("x", torch.tensor(1.0 + 1e-10, dtype=torch.float64), 1.0).passed
    assert not is_equal("x", 1.0 + 1e-8, 1.0).passed
    assert is_equal("x", 0.3, 0.30000001, tolerance=1e-6).passed
    assert not is_equal("x", float("nan"), 1.0).passed
    assert is_equal("x", 2.0, 1.0).measured == "2 (error 1e+00)"


def test_statements() -> None:
    assert is_true("x", torch.tensor(True), "seen").passed
    assert not is_true("x", False, "seen").passed
    assert is_true("x", True, "seen", expected="refused").expected == "refused"


def test_gradients() -> None:
    exact = KNOWN[0]
    assert follows("x", [exact["reverse"]], KNOWN, "reverse").passed
    assert follows("x", [2 * exact["reverse"]], KNOWN, "reverse", factor=2.0).passed
    assert not follows("x", [2 * exact["reverse"]], KNOWN, "reverse").passed
    assert not follows("x", [exact["forward"]], KNOWN, "reverse").passed
    assert follows("x", [torch.zeros_like(exact["forward"])], KNOWN, "zero").passed
    assert not follows("x", [exact["forward"]], KNOWN, "zero").passed
    neither = exact["forward"] + exact["reverse"]
    assert follows("x", [neither], KNOWN, NOTHING_KNOWN).passed
    assert not follows("x", [exact["local"]], KNOWN, NOTHING_KNOWN).passed
    assert follows("x", [neither], KNOWN, "reverse").measured == "neither KL"


def test_sections_are_stamped_and_exceptions_become_failures() -> None:
    assert run_section("a", lambda: [is_equal("x", 1.0, 1.0)])[0].section == "a"
    (broken,) = run_section("a", lambda: [is_equal("x", 1 // 0, 1.0)])
    assert (broken.passed, broken.section) == (False, "a")
    assert broken.measured.startswith("ZeroDivisionError")
