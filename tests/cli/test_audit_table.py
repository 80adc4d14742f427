"""A row of `klamp audit` and what is said below it, from judgements of functions whose gradients are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import Reach, Term, TermFinding
from klamp.cli.audit import HEADINGS, row, sentences
from klamp.verify.judge import judge
from klamp.verify.oracle import Followed

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def k3(policy: Tensor, ref: Tensor) -> Tensor:
    return torch.expm1(ref - policy) - (ref - policy)


def clamped(policy: Tensor, ref: Tensor) -> Tensor:
    return k3(policy - (policy - ref - (policy - ref).clamp(-2.0, 2.0)), ref)


def finding(function=k3, **changes: object) -> TermFinding:
    term = Term.of_function("as a loss", function)
    whole = TermFinding(
        term=term,
        judgement=judge(function),
        near=Followed("local_forward", 1.0),
        on_policy=Followed("local_forward", 1.0),
        off_policy=Followed("none of these", 0.0),
        reach=tuple(Reach(dtype=dtype, low=-30, high=30) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    )
    return dataclasses.replace(whole, **changes)


@pytest.fixture(scope="module")
def sound() -> TermFinding:
    return finding()


def cells(found: TermFinding) -> dict[str, str]:
    return dict(zip(HEADINGS, row(found), strict=True))


def test_a_sound_term(sound: TermFinding) -> None:
    assert cells(sound) == {
        "KL term": "as a loss",
        "value": "unbiased",
        "gradient": "forward",
        "off-policy": "neither",
        "stops at": "-",
        "fp32": "±30",
        "bf16": "±30",
        "fp16": "±30",
    }
    assert sentences(sound) == []


@pytest.mark.parametrize(
    ("followed", "text"),
    [
        (Followed("zero", 0.0), "zero"),
        (Followed("reverse", 1.0), "reverse"),
        (Followed("reverse", -1.0), "-reverse"),
        (Followed("reverse", 0.5), "0.5 reverse"),
        (None, "neither"),
    ],
)
def test_a_gradient_by_its_name_and_factor(sound: TermFinding, followed: Followed | None, text: str) -> None:
    if followed is None:
        assert cells(sound)["off-policy"] == text
    else:
        assert cells(dataclasses.replace(sound, off_policy=followed))["off-policy"] == text


def test_how_far_out_it_is_right(sound: TermFinding) -> None:
    short = Reach(dtype=torch.float16, low=-4, high=11, failure="inf")
    none = Reach(dtype=torch.bfloat16, low=0, high=0, failure="off")
    found = cells(dataclasses.replace(sound, reach=(sound.reach[0], none, short)))
    assert (found["bf16"], found["fp16"]) == ("0 +0 off", "-4 +11 inf")


def test_a_clamp_shows_where_it_stops_and_what_it_does_to_the_value() -> None:
    found = finding(clamped, near=Followed("local_forward", 1.0))
    assert cells(found)["stops at"] == "-2, +2"
    assert cells(found)["gradient"] == "forward near"
    (sentence,) = sentences(found)
    assert sentence.startswith("as a loss: its clamp changes the value by -")
    assert sentence.endswith("near the reference the value is unbiased.")


def test_tokens_that_get_in_each_others_way_are_told(sound: TermFinding) -> None:
    found = dataclasses.replace(sound, on_policy=Followed("none of these", 0.0))
    assert cells(found)["gradient"] == "neither"
    assert sentences(found) == [
        "as a loss: one token alone follows forward; completions of several tokens follow neither."
    ]


def test_a_term_that_raises_has_no_cells() -> None:
    found = TermFinding(term=Term.of_function("in the reward", k3), error="ValueError: no")
    assert row(found) == ("in the reward", "raises", *["-"] * 6)
    assert sentences(found) == ["in the reward: raises ValueError: no."]
