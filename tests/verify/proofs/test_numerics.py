"""The checks far from the reference fail where a clamp or a masked position takes part."""

from __future__ import annotations

import pytest
import torch
from tests.verify.proofs.broken import break_coefficient, failures

from klamp.core.gradients import kl_penalty
from klamp.verify.proofs import values
from klamp.verify.proofs.values import prove_numerics

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


def test_a_clamp_within_thirty_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    break_coefficient(monkeypatch, ("token", "reverse"), lambda value, log_w, delta: log_w.exp() * delta.clamp(-20, 20))
    found = failures(prove_numerics)
    assert {f"{name}, +-30 nats, gradient reverse" for name in ("float32", "bfloat16", "float16")} == set(found)


def test_a_forward_gradient_without_its_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    break_coefficient(monkeypatch, ("token", "forward"), lambda value, log_w, delta: delta.sign())
    assert "float32, +-30 nats, gradient forward" in failures(prove_numerics)


def test_a_mask_that_is_applied_after_the_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(policy, ref, mask, **choices):
        return kl_penalty(policy.nan_to_num(neginf=-9.0, nan=-9.0), ref.nan_to_num(), mask, **choices) + 0 * policy

    monkeypatch.setattr(values, "kl_penalty", unmasked)
    assert {"a masked -inf changes nothing", "a masked nan changes nothing"} <= set(failures(prove_numerics))


def test_a_penalty_that_differentiates_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def differentiated(policy, ref, mask, **choices):
        delta = policy - ref
        return (policy - policy.detach()).exp() * (torch.exp(-delta) - 1 + delta)

    monkeypatch.setattr(values, "kl_penalty", differentiated)
    assert "float32, -20 nats: klamp keeps what w k3 loses" in failures(prove_numerics)
