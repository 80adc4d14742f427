"""The checks of the clips fail when a clip, its gate or its place in a step is broken."""

from __future__ import annotations

import pytest
import torch
from tests.verify.proofs.broken import failures

from klamp.core.clipping import clip_gate, clip_kl
from klamp.core.penalty import advantages_with_kl
from klamp.verify import one_step
from klamp.verify.proofs import steps
from klamp.verify.proofs.steps import prove_clipping

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


def test_a_clip_at_half_of_its_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_half(kl: torch.Tensor, threshold: float, **choices: object) -> torch.Tensor:
        return clip_kl(kl, threshold / 2, **choices)  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "clip_kl", at_half)
    assert {"hard: max(0, 2 - 5) + max(0, 8 - 5)", "soft: slope sigmoid(8 - 5), by autograd"} <= set(
        failures(prove_clipping)
    )


def test_a_gate_that_opens_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.core.term.clip_gate", lambda *args, **kwargs: 0.5 * clip_gate(*args, **kwargs))
    assert "hard clip at 0: no clip" in failures(prove_clipping)


def test_a_clip_that_the_reward_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gate(*args, gate, **choices):
        return advantages_with_kl(*args, gate=None, **choices)

    monkeypatch.setattr(one_step, "advantages_with_kl", without_gate)
    assert failures(prove_clipping) == [
        "in the reward, hard clip at 1,000 nats: no pull",
        "in the reward, k1, hard clip at .3 nats: gated by the other of two",
    ]


def test_a_gate_of_sampled_tokens_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.core.term.gate_kl", lambda kl, **_: kl)
    assert [claim for claim in failures(prove_clipping) if "gated by the other" in claim] == [
        "in the loss, k3, hard clip at .3 nats: gated by the other of two",
        "in the reward, k1, hard clip at .3 nats: gated by the other of two",
    ]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_clipped_k1_as_a_loss_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.config.kl.refusals", lambda choices: [])
    assert "a clipped k1-as-loss is refused" in failures(prove_clipping)
