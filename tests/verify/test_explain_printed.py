"""Printed formulas in words: every sentence follows from what was measured, and changes with it."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from klamp.config.presets import OLD_NAMES
from klamp.errors import UnknownNameError
from klamp.verify.explain import Explanation
from klamp.verify.printed_formulas import FORMS, explain_form

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@functools.cache
def explained(name: str) -> Explanation:
    return explain_form(name)


def line(name: str, label: str) -> str:
    return dict(explained(name).lines)[label]


VERDICTS = [
    ("k1-as-loss", "the expected gradient is zero, so it regularises nothing"),
    ("minus-k1", "the sign is wrong, a reward for leaving the reference"),
    ("ratio-weighted", "for tokens of the policy it is not KL(policy||ref)"),
    ("exact-kl", "the value is right; it follows the gradient of KL(policy||ref)"),
    ("k3-as-loss", "it follows the gradient of KL(ref||policy)"),
]


def test_every_formula_has_a_verdict() -> None:
    assert {name for name, _ in VERDICTS} == set(FORMS)


@pytest.mark.parametrize(("name", "words"), VERDICTS)
def test_the_verdict_follows_from_the_numbers(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in explained(name).verdict
    other = "k3-as-loss" if name != "k3-as-loss" else "k1-as-loss"
    swapped = dataclasses.replace(FORMS[name], value=FORMS[other].value, use=FORMS[other].use)
    monkeypatch.setattr("klamp.verify.printed_formulas.FORMS", {name: swapped})
    assert words not in explain_form(name).verdict


@pytest.mark.parametrize(
    ("name", "pulls"),
    [
        ("k1-as-loss", "lowers the probability of every sampled token: it pushes away"),
        ("minus-k1", "raises the probability of every sampled token: it pulls towards"),
    ],
)
def test_with_tokens_of_an_older_policy_k1_knows_of_that_policy_only(name: str, pulls: str) -> None:
    assert pulls in line(name, "off-policy")


def test_forms_that_know_the_reference_say_nothing_of_older_policies() -> None:
    assert "off-policy" not in dict(explained("k3-as-loss").lines)
    assert "off-policy" not in dict(explained("ratio-weighted").lines)


def test_the_numbers_of_the_value() -> None:
    assert line("minus-k1", "value").startswith("-0.8851 nats per token where KL(policy||ref) is +0.8851")
    assert "right and unbiased" in line("k3-as-loss", "value")
    assert (
        "",
        "tokens of the reference instead: +0.8851, which is KL(policy||ref): the formula belongs to the other sampler",
    ) in explained("ratio-weighted").lines


def test_how_much_of_the_whole_gradient() -> None:
    assert line("k1-as-loss", "sequence") == "nothing of the gradient of KL(policy||ref) over whole completions"
    assert "% of its length (measured at up to 3 tokens)" in line("exact-kl", "sequence")


def test_where_it_breaks_and_what_to_take_instead() -> None:
    assert "float16" in line("k3-as-loss", "at 30 nats")
    assert line("k3-as-loss", "in klamp") == "kl_estimator='k3', kl_gradient='own'"
    assert line("minus-k1", "in klamp").startswith("no such term")
    assert "kl_gradient='reverse'" in line("k3-as-loss", "instead")


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_explained_under_the_new_one(old: str) -> None:
    assert explained(old).name == OLD_NAMES[old]
    assert "(docs/sources.md)" in line(old, "found in")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'minus-k1'"):
        explain_form("minus-k2")
