"""The answers about the k3 formula and about a real model's rows: right by other routes, and able to fail."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from klamp.core.estimators import ESTIMATORS
from klamp.errors import ShapeError
from klamp.verify.answers import (
    ROWS,
    SampleMean,
    answer_direction,
    answer_importance_sampling,
    direction_worlds,
    draw,
    follow,
    klamps_k3,
    printed_form,
    reversed_form,
    sampling_worlds,
    verify_logits,
)
from klamp.verify.oracle import expected, forward_kl, reverse_kl
from klamp.verify.worlds import one_position, random_chain


def test_the_reversed_formula_is_chi_squared_minus_the_kl() -> None:
    for chain in (direction_worlds()[name] for name in ("near", "far")):
        p, q = (chain.logprobs(who)[0].detach().exp() for who in ("policy", "ref"))
        chi_squared = (p**2 / q).sum() - 1
        assert expected(chain, reversed_form).item() == pytest.approx((chi_squared - reverse_kl(chain)).item())


def test_samples_agree_with_the_expectation_and_their_error_shrinks() -> None:
    chain = random_chain(0, vocab=4, length=2)
    exact = expected(chain, klamps_k3).item()
    few, many = (draw(chain, klamps_k3, samples=n, seed=1) for n in (1_000, 100_000))
    assert many.fits(exact)
    assert few.error / many.error == pytest.approx(10, rel=0.3)
    assert draw(chain, klamps_k3, samples=1_000, seed=1) == few
    assert draw(chain, klamps_k3, samples=1_000, seed=2) != few


def test_a_mean_that_is_off_does_not_fit() -> None:
    assert not SampleMean(mean=1.0, error=0.01).fits(1.1)
    assert SampleMean(mean=1.0, error=0.01).fits(1.04)
    assert SampleMean(mean=1.23456, error=0.0123).text == "1.235 +- 0.01"


def test_following() -> None:
    chains = [random_chain(seed, vocab=4, length=1, eos=None) for seed in range(2)]
    found, angle = follow(chains, printed_form)
    assert found.name == "forward"
    assert 0.5 < angle < 1
    assert follow(chains, lambda y: y.policy_logprobs) == (("zero", 0.0), 0.0)


def test_the_answer_about_the_direction() -> None:
    answer = answer_direction(samples=20_000)
    assert answer.passed
    values, gradients = answer.tables
    assert [row[1] for row in gradients.rows] == ["KL(ref||policy)", "neither KL", "KL(policy||ref)"]
    document_003 = {row[0]: row for row in values.rows}[".7 .2 .1 | .8 .1 .1"]
    by_hand = 0.7 * math.log(0.7 / 0.8) + 0.2 * math.log(2) + 0.1 * math.log(1)
    assert float(document_003[1]) == pytest.approx(by_hand, rel=1e-3)
    assert float(document_003[3]) == pytest.approx(by_hand, rel=1e-3)
    assert any("KL(ref||policy), the other direction" in words for words in answer.words)


@pytest.mark.parametrize(
    "value",
    [lambda d: torch.expm1(d) - d, lambda d: -(torch.expm1(-d) + d), lambda d: torch.expm1(-d) + d + 1e-6],
)
def test_the_answer_fails_when_k3_is_another_formula(value, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "k3", dataclasses.replace(ESTIMATORS["k3"], value=value))
    answer = answer_direction(samples=1_000)
    assert not answer.passed
    assert any("klamp's k3 is the printed formula" in check.claim for check in answer.checks if not check.passed)


def test_the_answer_fails_when_the_samples_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.verify.answers.printed_form", reversed_form)
    failed = [check.claim for check in answer_direction(samples=20_000).checks if not check.passed]
    assert "far: the samples agree" in failed


def test_the_answer_fails_when_klamps_gradient_turns_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    import klamp.core.gradients as gradients

    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: -delta)
    failed = [check.claim for check in answer_direction(samples=1_000).checks if not check.passed]
    assert "gradient of klamp's default: value k3, gradient reverse" in failed


def test_every_world_is_a_real_pair() -> None:
    for chain in direction_worlds().values():
        assert reverse_kl(chain).item() > 1e-3
    same = one_position(torch.zeros(3), torch.zeros(3))
    assert reverse_kl(same).item() == 0.0


def test_the_answer_about_samplers() -> None:
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


def test_the_answer_about_samplers_fails_when_klamp_forgets_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
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


NAMES = ("the policy", "the reference")


def rows(vocab: int = 40, prefixes: int = 12, spread: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    policy = 2 * torch.randn(prefixes, vocab, generator=generator)
    ref = policy + spread * torch.randn(prefixes, vocab, generator=generator)
    tokens = torch.multinomial(policy.softmax(-1), 1, generator=generator)[:, 0]
    return policy, ref, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_claims_hold_on_rows_of_any_type(dtype: torch.dtype) -> None:
    policy, ref, tokens = rows()
    answer = verify_logits(policy.to(dtype), ref.to(dtype), tokens, names=NAMES)
    assert [check.claim for check in answer.checks if not check.passed] == []
    values, gradients = answer.tables
    assert {row[0]: row[2] for row in values.rows}["k1"] == "unbiased"
    assert {row[0]: row[2] for row in values.rows}["k3"] == "unbiased"
    assert {row[0]: row[1] for row in gradients.rows}["k3, gradient own"] == "KL(ref||policy)"


def test_a_large_vocabulary_is_no_matter() -> None:
    policy, ref, tokens = rows(vocab=30_000, prefixes=3)
    assert verify_logits(policy, ref, tokens, names=NAMES).passed


def test_the_sampled_column_is_the_mean_over_the_drawn_tokens() -> None:
    policy, ref, tokens = rows()
    answer = verify_logits(policy, ref, tokens, names=NAMES)
    delta = (policy.log_softmax(-1) - ref.log_softmax(-1)).gather(-1, tokens[:, None])
    assert float(answer.tables[0].rows[0][3].split()[0]) == pytest.approx(delta.mean().item(), rel=1e-2)


def test_tokens_that_neither_model_allows_count_for_nothing() -> None:
    policy, ref, tokens = rows()
    forbidden = torch.full((len(policy), 5), -torch.inf)
    padded = verify_logits(torch.cat([policy, forbidden], 1), torch.cat([ref, forbidden], 1), tokens, names=NAMES)
    assert padded.passed
    assert padded.tables[0].rows == verify_logits(policy, ref, tokens, names=NAMES).tables[0].rows


def test_two_equal_models_are_called_equal() -> None:
    policy, _, tokens = rows()
    failed = [check.claim for check in verify_logits(policy, policy, tokens, names=NAMES).checks if not check.passed]
    assert "the two models differ" in failed


def test_a_broken_k3_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: torch.expm1(delta) - delta)
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    failed = [check.claim for check in verify_logits(*rows(), names=NAMES).checks if not check.passed]
    assert failed == ["k3 is unbiased (relative)"]


def test_a_broken_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import klamp.core.gradients as gradients

    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: -delta)
    failed = [check.claim for check in verify_logits(*rows(), names=NAMES).checks if not check.passed]
    assert failed == ["k3, gradient reverse as a loss"]


def test_rows_that_do_not_belong_together() -> None:
    policy, ref, tokens = rows()
    with pytest.raises(ShapeError, match="same tokenizer"):
        verify_logits(policy, ref[:, :-1], tokens, names=NAMES)
    with pytest.raises(ShapeError, match="belong together"):
        verify_logits(policy, ref, tokens[:-1], names=NAMES)
