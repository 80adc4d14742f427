"""Two sets of 40 losses, written from a specification of `klamp.check` alone, after its thresholds were fixed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

import klamp
from klamp.audit.verdict import Verdict

pytestmark = pytest.mark.slow


def verdicts(number: int) -> list[tuple[dict[str, Any], Verdict]]:
    """Each loss of a set with its verdict."""
    found = []
    for case in importlib.import_module(f"tests.audit.bench.heldout_{number}").LOSSES:
        loss, arguments = case["make"]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append((case, klamp.check(loss, once=False, **arguments)))
    return found


@pytest.mark.parametrize("number", [1, 2])
def test_no_sound_loss_is_accused_and_faults_are_named(number: int) -> None:
    cases = verdicts(number)
    sound = [verdict for case, verdict in cases if case["sound"]]
    faulty = {case["name"]: verdict for case, verdict in cases if not case["sound"]}
    assert len(sound) == len(faulty) == 20
    assert [verdict.codes("wrong") for verdict in sound if verdict.ok is False] == []
    missed = [name for name, verdict in faulty.items() if verdict.ok is not False]
    assert len(missed) <= 3, missed
