"""Auditing a host: stand-ins whose KL is known; how far out a type holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import (
    NEAR_SPREAD,
    Reach,
    Subject,
    Term,
    TermFinding,
    audit,
    audit_term,
    measure_reach,
    near_reference,
    per_token,
)
from klamp.core.gradients import kl_penalty
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


def test_the_near_worlds_are_near_and_the_bias_there_is_relative_to_the_reverse_kl() -> None:
    for seed in range(3):
        outcomes = enumerate_outcomes(random_chain(seed, vocab=5, length=1, eos=None, spread=NEAR_SPREAD))
        assert (outcomes.policy_logprobs - outcomes.ref_logprobs).abs().max() < 1.0
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


def weighted_k3(policy: Tensor, ref: Tensor) -> Tensor:
    return k3(policy, ref) * torch.exp(policy - policy.detach())


def summary(reach: Reach) -> tuple[int, int, str]:
    return reach.low, reach.high, reach.failure


def from_its_coefficient(policy: Tensor, ref: Tensor) -> Tensor:
    return kl_penalty(policy, ref, torch.ones_like(policy, dtype=torch.bool), value="k2", gradient="reverse")


def clamped_k2(policy: Tensor, ref: Tensor) -> Tensor:
    return (policy - ref).clamp(-2, 2).square() / 2


@pytest.mark.parametrize("function", [k2, from_its_coefficient, clamped_k2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k2_is_right_everywhere_and_a_clamp_is_no_matter_of_precision(function, dtype: torch.dtype) -> None:
    assert summary(measure_reach(function, dtype)) == (-30, 30, "")
    assert measure_reach(function, dtype).everywhere


def test_float16_overflows_where_exp_does() -> None:
    limit = math.log(torch.finfo(torch.float16).max)
    assert summary(measure_reach(k3, torch.float16)) == (-math.floor(limit), 30, "inf")


def test_a_weighted_k3_loses_its_gradient_to_cancellation() -> None:
    """Its gradient is a difference of two numbers of size exp(d), whose rounding passes d / 10 at about 17 nats."""
    low, high, failure = summary(measure_reach(weighted_k3, torch.float32))
    assert (low, high, failure) == (-17, 30, "off")
    assert math.exp(17) * torch.finfo(torch.float32).eps > 0.1 * 17
    assert measure_reach(weighted_k3, torch.bfloat16).low == -5


def test_nan_zero_and_exceptions_are_told_apart() -> None:
    def broken(kind: str):
        def function(policy: Tensor, ref: Tensor) -> Tensor:
            if policy.dtype == torch.float64:
                return k2(policy, ref)
            if kind == "raises":
                raise TypeError("no such kernel")
            return {"nan": k2(policy, ref) * math.nan, "zero": k2(policy.detach(), ref)}[kind]

        return function

    for kind in ("nan", "zero", "raises"):
        assert summary(measure_reach(broken(kind), torch.float32)) == (0, 0, kind)


def test_in_the_reward_the_value_is_the_coefficient() -> None:
    assert summary(measure_reach(k3, torch.float16, use="reward")) == (-11, 30, "inf")
    assert measure_reach(lambda p, ref: (p - ref).detach(), torch.float16, use="reward").everywhere
