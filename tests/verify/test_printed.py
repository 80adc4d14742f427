"""The printed formulas come out for what they are, by measurement."""

from __future__ import annotations

import math

import pytest
import torch

from klamp.errors import UnknownNameError
from klamp.verify.explain_printed import explain_form
from klamp.verify.oracle import expected_gradient, truths
from klamp.verify.printed import FORMS, as_function, measure_form, used
from klamp.verify.worlds import random_chain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@pytest.mark.parametrize("name", [name for name in FORMS if name != "source-003-exact"])
def test_the_formula_is_the_printed_one(name: str) -> None:
    """Written a second time, from the documents, on plain numbers."""
    policy, ref = torch.tensor([[-0.5, -2.0]], dtype=torch.float64), torch.tensor([[-1.5, -0.25]], dtype=torch.float64)
    printed = {
        "source-001": lambda p, r: p - r,
        "source-002": lambda p, r: r - p,
        "source-003": lambda p, r: math.exp(p - r) * (p - r),
        "source-004": lambda p, r: math.exp(r - p) - (r - p) - 1,
    }[name]
    by_hand = [printed(p, r) for p, r in zip(policy[0].tolist(), ref[0].tolist(), strict=True)]
    assert as_function(FORMS[name])(policy, ref)[0].tolist() == pytest.approx(by_hand, abs=1e-14)


def test_document_001_has_the_right_value_and_no_gradient() -> None:
    facts = measure_form("source-001")
    assert facts.bias == pytest.approx(0.0, abs=1e-12)
    assert facts.follows.name == "zero"
    assert facts.size < 1e-12
    assert facts.sequence_share == 0.0
    assert (facts.towards_sampler, facts.stray) == (pytest.approx(-1.0), pytest.approx(0.0, abs=1e-9))


def test_document_002_rewards_leaving_the_reference() -> None:
    facts = measure_form("source-002")
    assert facts.value == pytest.approx(-facts.reverse_kl, abs=1e-12)
    assert facts.value < 0
    assert facts.follows.name == "zero"
    assert facts.towards_sampler == pytest.approx(1.0)


def test_document_003_is_right_for_the_other_sampler_only() -> None:
    facts = measure_form("source-003")
    assert facts.bias > 1
    assert facts.value_under_ref == pytest.approx(facts.reverse_kl, abs=1e-12)
    assert facts.follows.name == "none of these"
    assert 0 < facts.cosine_reverse < 0.99


def test_document_003s_hands_on_example_is_exact() -> None:
    facts = measure_form("source-003-exact")
    assert facts.bias == pytest.approx(0.0, abs=1e-12)
    assert (facts.follows.name, facts.follows.factor) == ("reverse", pytest.approx(1.0))
    assert facts.judged is None


def test_document_004_has_the_right_value_and_the_other_gradient() -> None:
    facts = measure_form("source-004")
    assert facts.bias == pytest.approx(0.0, abs=1e-12)
    assert facts.follows.name == "forward"
    assert facts.cosine_forward == pytest.approx(1.0)
    assert facts.judged is not None
    assert facts.judged.gradient.follows.name == "forward"


def test_a_reward_form_is_summed_over_the_completion_before_the_score_function() -> None:
    chain = random_chain(0, length=3)
    k1_in_reward = FORMS["source-001"].__class__(**{**vars(FORMS["source-001"]), "use": "reward"})
    gradient = expected_gradient(chain, used(k1_in_reward))
    assert torch.allclose(gradient, truths(chain)["reverse"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("source-001", "the expected gradient is zero, so it regularises nothing"),
        ("source-002", "the sign is wrong, a reward for leaving the reference"),
        ("source-003", "for tokens of the policy it is not KL(policy||ref)"),
        ("source-003-exact", "the value is right; it follows the gradient of KL(policy||ref)"),
        ("source-004", "it follows the gradient of KL(ref||policy)"),
    ],
)
def test_the_words_follow_from_the_numbers(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in explain_form(name).verdict
    other = "source-004" if name != "source-004" else "source-001"
    swapped = FORMS[name].__class__(**{**vars(FORMS[name]), "value": FORMS[other].value, "use": FORMS[other].use})
    monkeypatch.setattr("klamp.verify.printed.FORMS", {name: swapped})
    assert words not in explain_form(name).verdict


def test_an_unknown_form() -> None:
    with pytest.raises(UnknownNameError, match="source-004"):
        measure_form("source-005")
