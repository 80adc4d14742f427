"""What is recommended: configurations that work, reasons whose numbers stand on the pages that they name."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tests.docs.pages import ROOT

from klamp.config import build_objective
from klamp.config.recommend import LONGEST, ORDER, RULES, Choice, recommend
from klamp.config.situation import Situation
from klamp.errors import KLWarning
from klamp.training.config import TrainConfig, field_owners

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
SWITCHES = ("gamed", "keeps", "lags", "ends_where_beta_says", "steady_length", "small_vocabulary", "low_precision")


def every_situation() -> Iterator[Situation]:
    """Every combination of the switches, with and without a free KL, several updates, and another range."""
    for flags in itertools.product((False, True), repeat=len(SWITCHES)):
        for free, updates, size in ((None, 1, 1.0), (0.1, 2, 5.0)):
            given: dict[str, Any] = dict(zip(SWITCHES, flags, strict=True))
            yield Situation(**given, free_kl=free, updates=updates, reward_range=size)


EVERY = list(every_situation())


def part_of(page: str) -> str:
    """The text that `FILE#heading` names, from that heading to the next one of its level; "" where there is none."""
    file, _, anchor = page.partition("#")
    text = (ROOT / file).read_text(encoding="utf-8")
    for head in re.finditer(r"^(#+) (.*)$", text, re.M):
        if re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head[2].lower()).strip()) == anchor:
            after = text[head.end() :]
            end = re.search(rf"^#{{1,{len(head[1])}}} ", after, re.M)
            return after[: end.start()] if end else after
    return "" if anchor else text


def choices() -> list[tuple[str, Choice]]:
    """Every choice that any situation leads to, once."""
    found = {(name, choice) for situation in EVERY for name, choice in recommend(situation).choices.items()}
    return sorted(found, key=lambda pair: (pair[0], pair[1].reason))


def test_every_recommendation_is_a_configuration_without_a_caution_of_its_own() -> None:
    for situation in EVERY:
        found = recommend(situation)
        with warnings.catch_warnings():
            warnings.simplefilter("error", KLWarning)
            config = TrainConfig.from_flat(found.values)
        build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length)
        assert config.kl.cautions() == []
        assert config.kl.needs_reference == situation.needs_kl == bool(found.price)
        assert {name: config.flat()[name] for name in found.values} == found.values


def test_numbers_in_reasons_stand_on_the_pages_that_they_name() -> None:
    for name, choice in choices():
        pages = " ".join(map(part_of, choice.rests_on))
        numbers = NUMBER.findall(choice.reason)
        missing = [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", pages)]
        assert not missing, (name, choice.reason, missing)


def test_pages_and_headings_exist() -> None:
    for name, choice in choices():
        assert choice.rests_on or name in ("num_generations", "num_iterations", "max_completion_length"), name
        for page in choice.rests_on:
            assert part_of(page), page


def test_the_fields_are_those_of_a_run_and_in_order() -> None:
    assert set(ORDER) <= set(field_owners())
    for situation in EVERY:
        names = list(recommend(situation).choices)
        assert names == [name for name in ORDER if name in names]


def test_every_rule_is_used_and_none_sets_what_is_not_shown() -> None:
    for rule in RULES:
        assert any(rule.applies(situation) for situation in EVERY)
        assert all(set(rule.settle(situation)) <= set(ORDER) for situation in EVERY if rule.applies(situation))


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({}, {"beta": 0.01, "target_kl": 0.05, "kl_estimator": "k3", "kl_gradient": "reverse", "kl_placement": "loss"}),
        ({"gamed": False, "keeps": False}, {"beta": 0.0, "loss_type": "dr_grpo"}),
        ({"keeps": False}, {"beta": 0.05}),
        ({"keeps": False, "reward_range": 10.0}, {"beta": 0.5}),
        ({"reward_range": 10.0}, {"beta": 0.1, "beta_max": 134.164}),
        ({"updates": 3}, {"kl_off_policy": "token", "num_iterations": 3}),
        ({"lags": True}, {"kl_off_policy": "token"}),
        ({"steady_length": True}, {"kl_placement": "reward", "kl_estimator": "k1", "target_kl": 0.05}),
        ({"ends_where_beta_says": True}, {"kl_placement": "reward", "beta": 0.05}),
        ({"small_vocabulary": True}, {"kl_estimator": "exact"}),
        ({"free_kl": 0.1}, {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}),
        ({"low_precision": True}, {"kl_max_log_ratio": 10.0}),
        ({"max_length": 1500, "group_size": 4}, {"max_completion_length": 1500, "num_generations": 4}),
    ],
)
def test_a_situation_decides(situation: dict[str, Any], expected: dict[str, Any]) -> None:
    values = recommend(Situation(**situation)).values
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("situation", "absent"),
    [
        ({"gamed": False, "keeps": False, "steady_length": True, "free_kl": 0.1}, ("kl_placement", "kl_clip_method")),
        ({"ends_where_beta_says": True}, ("target_kl",)),
        ({"free_kl": 0.1}, ("target_kl",)),
        ({"steady_length": True, "updates": 2}, ("kl_off_policy",)),
        ({"small_vocabulary": True, "updates": 2, "low_precision": True}, ("kl_off_policy", "kl_max_log_ratio")),
        ({}, ("beta_max",)),
    ],
)
def test_what_would_have_no_effect_or_work_against_it_is_left_out(
    situation: dict[str, Any], absent: tuple[str, ...]
) -> None:
    assert not set(absent) & set(recommend(Situation(**situation)).choices)


def test_the_price_in_both_units() -> None:
    found = recommend(Situation(length=200, keeps=False, group_size=4))
    assert found.price == (
        "0.05 reward per nat of a whole completion; of the mean per token, at 200 tokens: 10 per nat"
    )
    target = recommend(Situation(length=200)).choices["target_kl"].computed
    assert target == "at 200 tokens 0.05 per token is 10 nats per completion"


def test_what_no_record_says_is_said() -> None:
    assert any(f"have {LONGEST} tokens" in text for text in recommend(Situation(length=25)).cautions)
    assert recommend(Situation(length=LONGEST)).cautions == ()
    language = (ROOT / "examples" / "describe.yaml").read_text(encoding="utf-8")
    assert f"max_completion_length: {LONGEST}" in language
    assert f"{LONGEST} tokens" in (ROOT / "docs" / "clipping-study.md").read_text(encoding="utf-8")


def test_computed_numbers_follow_the_situation() -> None:
    eight, two = (recommend(Situation(group_size=size)).choices["advantage_baseline"].computed for size in (8, 2))
    assert "1.14 x beta" in eight and "2 x beta" in two
