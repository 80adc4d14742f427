"""The proofs pass on klamp as it is, and each fails when the part that it is about is broken."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from klamp.core.clipping import clip_gate, clip_kl
from klamp.core.estimators import DIRECTIONS, ESTIMATORS
from klamp.core.gradients import COEFFICIENTS, kl_penalty
from klamp.core.penalty import advantages_with_kl
from klamp.verify.oracle import NOTHING_KNOWN, truths
from klamp.verify.proofs import PROOFS
from klamp.verify.proofs.check import Proof, follows, is_equal, is_true, run_section
from klamp.verify.proofs.gradients import prove_clipping, prove_gradients, prove_sequences
from klamp.verify.proofs.values import measure_estimators, prove_gaussians, prove_numerics, prove_values
from klamp.verify.worlds import random_chain


def failures(proof: Proof) -> list[str]:
    return [check.claim for check in run_section("", proof) if not check.passed]


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


def unmasked(policy, ref, mask, **choices):
    return kl_penalty(policy.nan_to_num(neginf=-9.0, nan=-9.0), ref.nan_to_num(), mask, **choices) + 0 * policy


def differentiated(policy, ref, mask, **choices):
    delta = policy - ref
    return (policy - policy.detach()).exp() * (torch.exp(-delta) - 1 + delta)


def without_gate(rewards, prepared, **choices):
    return advantages_with_kl(rewards, dataclasses.replace(prepared, gate=None), **choices)


IN_VALUES, IN_GRADIENTS = "klamp.verify.proofs.values", "klamp.verify.proofs.gradients"
POLICY, WEIGHTED = (f"whichever the value; tokens of {x}" for x in ("the policy", "another sampler, weighted"))
DTYPES = ("float32", "bfloat16", "float16")
BROKEN: list[tuple[Any, Callable[..., Any], Proof, set[str]]] = [
    ("k3", lambda d: -(torch.expm1(-d) + d), prove_values, {"E[k3] - KL(policy||ref)", "k3 is never negative"}),
    ("k3", lambda d: -(torch.expm1(-d) + d), prove_gaussians, {"Gaussians 1 apart: E[k3] = m^2/2"}),
    # exp(policy - ref) instead of exp(ref - policy): the k3 bug report's first thought
    ("k3", lambda d: torch.expm1(d) - d, prove_values, {"top-p sampling: k3 is low by the reference's lost mass"}),
    ("k1", lambda d: -d, prove_values, {"E[k1] - KL(policy||ref)"}),
    ("k1", lambda d: d / 2, prove_gaussians, {f"Gaussians 1 apart: {x}" for x in ("E[k1] = m^2/2", "Var k1 = m^2")}),
    ("k2", lambda d: d**2, prove_values, {"k2's bias is of third order: at half the distance 1/8"}),
    ("abs", lambda d: d.abs() / 2, prove_values, {"abs over-estimates"}),
    (("token", "reverse"), lambda v, w, d: -w.exp() * d, prove_gradients, {f"gradient reverse, {POLICY}"}),
    (("token", "reverse"), lambda v, w, d: d, prove_gradients, {f"gradient reverse, {WEIGHTED}"}),
    (("token", "reverse"), lambda v, w, d: w.exp() * d.clamp(-20, 20), prove_numerics,
     {f"{x}, +-30 nats, gradient reverse" for x in DTYPES}),
    (("token", "forward"), lambda v, w, d: w.exp() * torch.expm1(-d), prove_gradients, {f"gradient forward, {POLICY}"}),
    (("token", "forward"), lambda v, w, d: d.sign(), prove_numerics, {"float32, +-30 nats, gradient forward"}),
    # what sees its own token only
    (("sequence", "reverse"), lambda v, w, d: w.exp() * d, prove_sequences, {"horizon sequence, value k3"}),
    (("sequence", "forward"), lambda v, w, d: -torch.expm1(-d), prove_sequences,
     {"horizon sequence, gradient forward"}),
    (f"{IN_VALUES}.kl_penalty", unmasked, prove_numerics, {f"a masked {x} changes nothing" for x in ("-inf", "nan")}),
    (f"{IN_VALUES}.kl_penalty", differentiated, prove_numerics, {"float32, -20 nats: klamp keeps what w k3 loses"}),
    (f"{IN_GRADIENTS}.clip_kl", lambda kl, threshold, **choices: clip_kl(kl, threshold / 2, **choices), prove_clipping,
     {"hard: max(0, 2 - 5) + max(0, 8 - 5)", "soft: slope sigmoid(8 - 5), by autograd"}),
    ("klamp.core.term.clip_gate", lambda *args, **choices: 0.5 * clip_gate(*args, **choices), prove_clipping,
     {"hard clip at 0: no clip"}),
    ("klamp.verify.one_step.advantages_with_kl", without_gate, prove_clipping,
     {"in the reward, hard clip at 1,000 nats: no pull",
      "in the reward, k1, hard clip at .3 nats: gated by the other of two"}),
    ("klamp.config.kl.refusals", lambda choices: [], prove_clipping, {"a clipped k1-as-loss is refused"}),
]  # fmt: skip
"""An estimator, whose value is broken; a horizon and a gradient, whose coefficient is; or a function's path."""


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("part", "broken", "proof", "claims"), BROKEN)
def test_a_broken_part_fails_its_claims(part, broken, proof: Proof, claims: set[str], monkeypatch) -> None:
    if isinstance(part, tuple):
        monkeypatch.setitem(COEFFICIENTS, part, broken)
    elif part in ESTIMATORS:
        monkeypatch.setitem(ESTIMATORS, part, dataclasses.replace(ESTIMATORS[part], value=broken))
    else:
        monkeypatch.setattr(part, broken)
    assert claims <= set(failures(proof))


def test_the_exact_kl_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIRECTIONS, "reverse", DIRECTIONS["forward"])
    assert "exact at one position - KL(policy||ref)" in failures(prove_values)
    assert {"horizon token, exact", "horizon sequence, exact"} <= set(failures(prove_sequences))


def test_an_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = dataclasses.replace(ESTIMATORS["k2"], derivative=lambda delta: -delta)
    monkeypatch.setitem(ESTIMATORS, "k2", turned)
    assert failures(prove_gradients) == ["k2 as a loss (its own gradient)"]
