"""The estimators side by side: what is measured agrees with what the table of the core claims."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from klamp.core.estimators import ESTIMATORS
from klamp.verify.proofs.values import measure_estimators

CLAIMED = {"zero": "zero", "reverse KL": "reverse", "forward KL": "forward", "L1 distance": "none of these"}


def test_what_the_core_claims_is_what_is_measured() -> None:
    facts = {each.name: each for each in measure_estimators()}
    assert set(facts) == {*ESTIMATORS, "exact"}
    for name, row in ESTIMATORS.items():
        assert facts[name].as_loss.name == CLAIMED[row.gradient_as_loss]
        assert (facts[name].lowest >= 0) == row.non_negative
        assert (facts[name].bias_text == "unbiased") == row.bias.startswith("unbiased")
        assert facts[name].formula == row.formula
    assert (facts["exact"].as_loss.name, facts["exact"].deviation) == ("reverse", 0.0)
    assert facts["k1"].in_reward.name == "reverse"
    assert facts["k3"].in_reward.name == "reverse - forward"


def test_a_bias_is_written_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k1"], value=lambda delta: 1.5 * delta, derivative=torch.ones_like)
    monkeypatch.setitem(ESTIMATORS, "k1", row)
    assert measure_estimators()[0].bias_text == "+50 %"
