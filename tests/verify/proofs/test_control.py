"""The checks of the controllers fail when a rule moves beta otherwise than it says."""

from __future__ import annotations

import pytest
from tests.verify.proofs.broken import failures

from klamp.core.beta_rules import BetaState, DualRule, PIDRule, ProportionalRule, StepRule
from klamp.verify.proofs.steps import prove_controllers


def test_a_step_rule_that_always_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepRule, "_next", lambda self, state, kl, n_steps: BetaState(state.value * 2))
    assert {"step: KL above 1.5 targets", "step: KL on target"} <= set(failures(prove_controllers))


def test_a_proportional_rule_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProportionalRule, "_next", lambda self, state, kl, n_steps: state)
    found = failures(prove_controllers)
    assert "proportional: x (1 + 0.2 n / horizon), saturated" in found
    assert "proportional: more steps than the horizon is refused" in found


@pytest.mark.parametrize(("rule", "claim"), [(DualRule, "dual: + lr (KL - target)"), (PIDRule, "PID: kp e + I")])
def test_a_rule_that_stands_still(rule: type, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_next", lambda self, state, kl, n_steps: state)
    assert any(each.startswith(claim) for each in failures(prove_controllers))
