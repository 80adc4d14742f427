"""`klamp verify convergence`: the table says of each setting what enumeration finds, and no more."""

from __future__ import annotations

import pytest

from klamp.config import KLConfig, LossConfig
from klamp.verify import convergence
from klamp.verify.convergence import LOSSES, answer_convergence, claims_exact, terms, worlds

pytestmark = pytest.mark.slow


def test_every_claim_holds(monkeypatch):
    small = worlds()[:2]  # the command counts 6 tokens too
    monkeypatch.setattr(convergence, "worlds", lambda: small)
    convergence.ends.cache_clear()
    answer = answer_convergence()
    assert [check.claim for check in answer.checks if not check.passed] == []
    assert len(answer.checks) > 40
    rows = {row[0]: row[1:] for row in answer.tables[0].rows}
    assert rows["reward, k1"] == ("exact", "exact", "exact", "refused")
    assert rows["loss, k3, sequence"][:2] == ("exact", "exact")
    assert rows["loss, k1, gradient own"][0] == "runs away"
    assert set(rows) == set(terms())
    convergence.ends.cache_clear()


def test_what_is_claimed_to_be_exact():
    exact = {(term, loss) for term, kl in terms().items() for loss, of in LOSSES.items() if claims_exact(kl, of)}
    in_reward = {("reward, k1", loss) for loss in LOSSES if "std" not in loss}
    over_sequences = {
        (term, loss)
        for term in ("loss, k3, sequence", "loss, k1, sequence", "loss, exact, sequence", "advantage, k1, sequence")
        for loss in ("fixed length", "token mean")
    }
    assert exact == in_reward | over_sequences
    assert not claims_exact(KLConfig(kl_horizon="sequence", kl_normalizer="sequence_mean"), LOSSES["fixed length"])
    assert not claims_exact(KLConfig(kl_horizon="sequence", kl_clip_method="hard"), LossConfig(loss_type="dr_grpo"))
