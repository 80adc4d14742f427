"""The proofs together: all of them pass on klamp as it is, and one that stops is a failed check."""

from __future__ import annotations

import functools

import pytest

from klamp.core.estimators import ESTIMATORS
from klamp.verify.proofs import ESTIMATOR_PROOFS, PROOFS, verify_all, verify_estimators
from klamp.verify.proofs.check import Check, run_section

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@functools.cache
def everything() -> list[Check]:
    return verify_all()


@pytest.mark.parametrize("section", PROOFS)
def test_a_section_passes_and_says_something(section: str) -> None:
    checks = [check for check in everything() if check.section == section]
    assert [check.claim for check in checks if not check.passed] == []
    assert len(checks) >= 6
    assert all(check.claim and check.measured and check.expected for check in checks)
    assert len({check.claim for check in checks}) == len(checks)


def test_the_estimators_are_a_part_of_everything() -> None:
    few, many = verify_estimators(), everything()
    assert {check.section for check in few} == set(ESTIMATOR_PROOFS)
    assert {check.section for check in many} == set(PROOFS)
    assert len(few) < len(many)


def test_a_proof_that_stops_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ESTIMATORS, "abs")
    section = "values: tokens of the policy"
    checks = run_section(section, PROOFS[section])
    assert [(check.claim, check.passed) for check in checks] == [("the proof runs to its end", False)]
    assert "KL estimator" in checks[0].measured or "KeyError" in checks[0].measured
