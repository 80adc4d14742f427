"""The proofs pass on klamp as it is, and each fails when the part that it is about is broken."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from klamp.core.clipping import clip_gate, clip_kl
from klamp.core.estimators import DIRECTIONS, ESTIMATORS
from klamp.core.gradients import COEFFICIENTS, kl_penalty
from klamp.core.penalty import advantages_with_kl
from klamp.verify import one_step
from klamp.verify.oracle import NOTHING_KNOWN, truths
from klamp.verify.proofs import PROOFS, gradients, values
from klamp.verify.proofs.check import Proof, follows, is_equal, is_true, run_section
from klamp.verify.proofs.gradients import prove_clipping, prove_gradients, prove_sequences
from klamp.verify.proofs.values import measure_estimators, prove_gaussians, prove_numerics, prove_values
from klamp.verify.worlds import random_chain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


def failures(proof: Proof) -> list[str]:
    return [check.claim for check in run_section("", proof) if not check.passed]


def break_estimator(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(ESTIMATORS, name, dataclasses.replace(ESTIMATORS[name], **changes))  # type: ignore[arg-type]


def break_coefficient(monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], broken: Callable[..., object]) -> None:
    monkeypatch.setitem(COEFFICIENTS, key, broken)  # type: ignore[arg-type]


CHAIN = random_chain(0)
KNOWN = [truths(CHAIN)]


def test_equal_numbers_and_statements() -> None:
    assert is_equal("x", 1.0, 1.0).measured == "1 (exactly)"
    assert is_equal("x", torch.tensor(1.0 + 1e-10, dtype=torch.float64), 1.0).passed
    assert not is_equal("x", 1.0 + 1e-8, 1.0).passed
    assert is_equal("x", 0.3, 0.30000001, tolerance=1e-6).passed
    assert not is_equal("x", float("nan"), 1.0).passed
    assert is_equal("x", 2.0, 1.0).measured == "2 (error 1e+00)"
    assert is_true("x", torch.tensor(True), "seen").passed
    assert not is_true("x", False, "seen").passed
    assert is_true("x", True, "seen", expected="refused").expected == "refused"


def test_gradients() -> None:
    exact = KNOWN[0]
    assert follows("x", [exact["reverse"]], KNOWN, "reverse").passed
    assert follows("x", [2 * exact["reverse"]], KNOWN, "reverse", factor=2.0).passed
    assert not follows("x", [2 * exact["reverse"]], KNOWN, "reverse").passed
    assert not follows("x", [exact["forward"]], KNOWN, "reverse").passed
    assert follows("x", [torch.zeros_like(exact["forward"])], KNOWN, "zero").passed
    assert not follows("x", [exact["forward"]], KNOWN, "zero").passed
    neither = exact["forward"] + exact["reverse"]
    assert follows("x", [neither], KNOWN, NOTHING_KNOWN).passed
    assert not follows("x", [exact["local"]], KNOWN, NOTHING_KNOWN).passed
    assert follows("x", [neither], KNOWN, "reverse").measured == "neither KL"


def test_sections_are_stamped_and_exceptions_become_failures() -> None:
    assert run_section("a", lambda: [is_equal("x", 1.0, 1.0)])[0].section == "a"
    (broken,) = run_section("a", lambda: [is_equal("x", 1 // 0, 1.0)])
    assert (broken.passed, broken.section) == (False, "a")
    assert broken.measured.startswith("ZeroDivisionError")


def test_a_proof_that_stops_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ESTIMATORS, "abs")
    section = "values: tokens of the policy"
    checks = run_section(section, PROOFS[section])
    assert [(check.claim, check.passed) for check in checks] == [("the proof runs to its end", False)]
    assert "KL estimator" in checks[0].measured or "KeyError" in checks[0].measured


CLAIMED = {"zero": "zero", "reverse": "reverse", "forward": "forward", "L1 distance": "none of these"}


def test_what_the_core_claims_is_what_is_measured() -> None:
    facts = {each.name: each for each in measure_estimators()}
    assert set(facts) == {*ESTIMATORS, "exact"}
    for name, row in ESTIMATORS.items():
        assert facts[name].as_loss.name == CLAIMED[row.gradient_as_loss]
        assert (facts[name].lowest >= 0) == row.non_negative
        assert (facts[name].bias_text == "unbiased") == row.bias.startswith("unbiased")
        assert facts[name].formula == row.formula
    assert (facts["exact"].as_loss.name, facts["exact"].deviation) == ("reverse", pytest.approx(0.0, abs=1e-9))
    assert facts["k1"].in_reward.name == "reverse"
    assert facts["k3"].in_reward.name == "reverse - forward"


@pytest.mark.parametrize(
    ("name", "value", "proof", "claims"),
    [
        ("k3", lambda d: -(torch.expm1(-d) + d), prove_values, {"E[k3] - KL(policy||ref)", "k3 is never negative"}),
        ("k3", lambda d: -(torch.expm1(-d) + d), prove_gaussians, {"Gaussians 1 apart: E[k3] = m^2/2"}),
        (  # exp(policy - ref) instead of exp(ref - policy): the k3 bug report's first thought
            "k3",
            lambda d: torch.expm1(d) - d,
            prove_values,
            {"E[k3] - KL(policy||ref)", "top-p sampling: k3 is low by the reference's lost mass"},
        ),
        ("k1", lambda d: -d, prove_values, {"E[k1] - KL(policy||ref)"}),
        (
            "k1",
            lambda d: d / 2,
            prove_gaussians,
            {"Gaussians 1 apart: E[k1] = m^2/2", "Gaussians 1 apart: Var k1 = m^2"},
        ),
        ("k2", lambda d: d**2, prove_values, {"k2's bias is of third order: at half the distance 1/8"}),
        ("abs", lambda d: d.abs() / 2, prove_values, {"abs over-estimates"}),
    ],
)
def test_a_value(
    name: str, value: Callable[..., object], proof: Proof, claims: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_estimator(monkeypatch, name, value=value)
    assert claims <= set(failures(proof))


def test_the_exact_kl_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIRECTIONS, "reverse", DIRECTIONS["forward"])
    assert "exact at one position - KL(policy||ref)" in failures(prove_values)
    assert {"horizon token, exact", "horizon sequence, exact"} <= set(failures(prove_sequences))


def test_a_clamp_within_thirty_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    break_coefficient(monkeypatch, ("token", "reverse"), lambda value, log_w, delta: log_w.exp() * delta.clamp(-20, 20))
    failed = failures(prove_numerics)
    assert {f"{name}, +-30 nats, gradient reverse" for name in ("float32", "bfloat16", "float16")} == set(failed)


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


def test_an_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k2", derivative=lambda delta: -delta)
    assert failures(prove_gradients) == ["k2 as a loss (its own gradient)"]


POLICY = "whichever the value; tokens of the policy"
WEIGHTED = "whichever the value; tokens of another sampler, weighted"


@pytest.mark.parametrize(
    ("horizon", "gradient", "broken", "proof", "claim"),
    [
        ("token", "reverse", lambda v, w, d: -w.exp() * d, prove_gradients, f"gradient reverse, {POLICY}"),
        # the weight forgotten
        ("token", "reverse", lambda v, w, d: d, prove_gradients, f"gradient reverse, {WEIGHTED}"),
        ("token", "forward", lambda v, w, d: w.exp() * torch.expm1(-d), prove_gradients, f"gradient forward, {POLICY}"),
        ("token", "forward", lambda v, w, d: d.sign(), prove_numerics, "float32, +-30 nats, gradient forward"),
        # what sees its own token only
        ("sequence", "reverse", lambda v, w, d: w.exp() * d, prove_sequences, "horizon sequence, value k3"),
        (
            "sequence",
            "forward",
            lambda v, w, d: -torch.expm1(-d),
            prove_sequences,
            "horizon sequence, gradient forward",
        ),
    ],
)
def test_a_coefficient(
    horizon: str,
    gradient: str,
    broken: Callable[..., object],
    proof: Proof,
    claim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_coefficient(monkeypatch, (horizon, gradient), broken)
    assert claim in failures(proof)


def test_a_clip_at_half_of_its_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_half(kl: torch.Tensor, threshold: float, **choices: object) -> torch.Tensor:
        return clip_kl(kl, threshold / 2, **choices)  # type: ignore[arg-type]

    monkeypatch.setattr(gradients, "clip_kl", at_half)
    assert {"hard: max(0, 2 - 5) + max(0, 8 - 5)", "soft: slope sigmoid(8 - 5), by autograd"} <= set(
        failures(prove_clipping)
    )


def test_a_gate_that_opens_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.core.term.clip_gate", lambda *args, **kwargs: 0.5 * clip_gate(*args, **kwargs))
    assert "hard clip at 0: no clip" in failures(prove_clipping)


def test_a_clip_that_the_reward_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gate(rewards, prepared, **choices):
        return advantages_with_kl(rewards, replace(prepared, gate=None), **choices)

    monkeypatch.setattr(one_step, "advantages_with_kl", without_gate)
    assert failures(prove_clipping) == [
        "in the reward, hard clip at 1,000 nats: no pull",
        "in the reward, k1, hard clip at .3 nats: gated by the other of two",
    ]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_clipped_k1_as_a_loss_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.config.kl.refusals", lambda choices: [])
    assert "a clipped k1-as-loss is refused" in failures(prove_clipping)
