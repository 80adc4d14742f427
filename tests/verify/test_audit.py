"""Auditing a host: stand-ins whose KL is known, from a clean k2 to a ratio over the whole completion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import NEAR_SPREAD, Subject, Term, TermFinding, audit, audit_term, near_reference, per_token
from klamp.errors import ShapeError
from klamp.verify.worlds import enumerate_outcomes, random_chain


def k2(policy: Tensor, ref: Tensor) -> Tensor:
    return (policy - ref).square() / 2


def k3(policy: Tensor, ref: Tensor) -> Tensor:
    return torch.expm1(ref - policy) + (policy - ref)


def by_token(policy: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    return (k3(policy, ref) * torch.exp(policy - old)).sum()


def by_completion(policy: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    return (k3(policy, ref) * torch.exp((policy - old).mean())).sum()


def names(finding: TermFinding) -> tuple[str, str, str]:
    assert finding.judgement and finding.on_policy and finding.off_policy
    return finding.judgement.gradient.follows.name, finding.on_policy.name, finding.off_policy.name


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Term.of_function("k2", k2), ("reverse", "local", "none of these")),
        (Term.of_function("k3", k3), ("forward", "local_forward", "none of these")),
        (Term.of_function("k1", lambda p, ref: p - ref), ("zero", "zero", "none of these")),
        (
            Term.of_function("k1 in the reward", lambda p, ref: p - ref, use="reward"),
            ("reverse", "reverse", "none of these"),
        ),
        (Term(name="w k3", completion=by_token), ("reverse", "local", "local_sampled")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gradients_on_and_off_policy(term: Term, expected: tuple[str, str, str]) -> None:
    finding = audit_term(term)
    assert names(finding) == expected
    assert finding.token_by_token
    assert finding.error == ""


def test_a_ratio_of_the_whole_completion_shows_only_beyond_one_token() -> None:
    finding = audit_term(Term(name="sequence ratio", completion=by_completion))
    assert names(finding) == ("reverse", "none of these", "none of these")
    assert not finding.token_by_token


def test_near_the_reference_a_clamp_is_not_reached() -> None:
    def clamped(policy: Tensor, ref: Tensor) -> Tensor:
        return k3(policy, ref).clamp(max=1.0)

    finding = audit_term(Term.of_function("clamped k3", clamped))
    assert finding.judgement and finding.near
    assert finding.judgement.gradient.follows.name == "none of these"
    assert finding.near.name == "forward"
    assert abs(finding.near_bias) < 1e-12 < abs(finding.judgement.value.relative_bias)


def test_the_near_worlds_are_near() -> None:
    for seed in range(3):
        outcomes = enumerate_outcomes(random_chain(seed, vocab=5, length=1, eos=None, spread=NEAR_SPREAD))
        assert (outcomes.policy_logprobs - outcomes.ref_logprobs).abs().max() < 1.0


def test_near_bias_is_relative_to_the_reverse_kl() -> None:
    bias, followed = near_reference(lambda p, ref: 1.25 * k3(p, ref))
    assert bias == pytest.approx(0.25)
    assert followed.factor == pytest.approx(1.25)


def test_tokens_found_one_by_one_are_those_of_the_function() -> None:
    policy, ref = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    found = per_token(Term.of_function("k2", k2))(policy, ref)
    torch.testing.assert_close(found, k2(policy, ref))


def test_what_a_host_raises_is_the_finding_of_that_term_alone() -> None:
    def full(policy: Tensor, ref: Tensor) -> Tensor:
        raise NotImplementedError

    subject = Subject(title="host", terms=(Term.of_function("k2", k2), Term.of_function("full", full)))
    first, second = audit(subject).findings
    assert first.error == ""
    assert (second.error, second.judgement) == ("NotImplementedError", None)
    assert second.token_by_token


def test_a_function_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="one number per token"):
        audit_term(Term.of_function("mean", lambda p, ref: k2(p, ref).mean()))


def test_reductions_are_measured_in_units_of_the_first_term() -> None:
    def loss(policy: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, k2(policy, ref), 0.0).sum() / mask.sum()

    subject = Subject(title="host", terms=(Term.of_function("k2", k2),), reductions={"mean": loss})
    assert audit(subject).reductions == {"mean": "mean over the tokens of the batch"}
