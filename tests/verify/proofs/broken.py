"""Klamp with one of its parts broken, and what a proof then says: each proof has to notice what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import klamp.core.gradients as gradients
from klamp.core.estimators import ESTIMATORS
from klamp.verify.proofs.check import Proof, run_section


def failures(proof: Proof) -> list[str]:
    """The claims of a proof that fail now."""
    return [check.claim for check in run_section("", proof) if not check.passed]


def break_estimator(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(ESTIMATORS, name, dataclasses.replace(ESTIMATORS[name], **changes))  # type: ignore[arg-type]


def break_coefficient(monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], broken: Callable[..., object]) -> None:
    monkeypatch.setitem(gradients.COEFFICIENTS, key, broken)  # type: ignore[arg-type]
