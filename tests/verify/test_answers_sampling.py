"""Who drew the tokens: the table of samplers and formulas, against closed forms."""

from __future__ import annotations

import pytest
import torch

from klamp.verify.answers_sampling import ROWS, answer_importance_sampling, sampling_worlds
from klamp.verify.oracle import forward_kl, reverse_kl


def test_the_answer() -> None:
    answer = answer_importance_sampling(samples=50_000)
    assert answer.passed
    (table,) = answer.tables
    seen = {(row[0], row[1]): row for row in table.rows}
    assert len(seen) == len(ROWS)
    assert seen["policy", "printed (k3)"][4:6] == ("KL(p||r)", "KL(ref||policy)")
    assert seen["policy", "reversed"][4] == "-"
    assert seen["reference", "reversed"][4:6] == ("KL(r||p)", "KL(ref||policy)")
    assert seen["older policy", "printed (k3)"][4:6] == ("-", "neither KL")
    assert seen["older policy", "klamp, weighted"][4:6] == ("KL(p||r)", "KL(policy||ref)")


def test_the_numbers_by_hand() -> None:
    world = sampling_worlds()["policy"]
    p, q = (world.logprobs(who)[0].detach().exp() for who in ("policy", "ref"))
    (table,) = answer_importance_sampling(samples=1_000).tables
    reverse, forward = (p * (p / q).log()).sum().item(), (q * (q / p).log()).sum().item()
    assert f"KL(p||r) = {reverse:.4f}, KL(r||p) = {forward:.4f}" in table.title
    assert (reverse, forward) == pytest.approx((reverse_kl(world).item(), forward_kl(world).item()))
    back = ((p**2 / q).sum() - 1).item() - reverse
    assert float(table.rows[1][2]) == pytest.approx(back, rel=1e-3)
    assert back > 100 * reverse


def test_it_fails_when_klamp_forgets_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    import klamp.core.gradients as gradients

    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: delta)
    failed = [check.claim for check in answer_importance_sampling(samples=1_000).checks if not check.passed]
    assert failed == ["tokens of the older policy, klamp, weighted"]


def test_the_samplers_differ_and_share_policy_and_reference() -> None:
    worlds = sampling_worlds()
    assert worlds["policy"].on_policy
    assert not worlds["older policy"].on_policy
    for world in worlds.values():
        assert torch.equal(world.policy_logits, worlds["policy"].policy_logits)
        assert world.logprobs("policy").exp().sum().item() == pytest.approx(1.0)
        assert world.logits("ref").exp().sum().item() == pytest.approx(1.0)
