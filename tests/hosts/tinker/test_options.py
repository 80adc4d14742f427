"""The options of the loss: each is checked before any datum is read, and becomes the core's objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.hosts.tinker.fakes import fake_batch

from klamp import KLConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError, KlampError, UnknownNameError
from klamp.hosts.tinker.options import KL_COEF, in_force, make_settings, merge_coefficients, reference_length_of


def test_without_arguments_it_is_klamps_default() -> None:
    settings = make_settings()
    objective = settings.objective
    assert (objective.surrogate, objective.reduction, objective.beta) == ("ppo_clip", "token_mean", KLConfig.beta)
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.2)
    assert objective.kl == KLConfig().build_term()
    assert (settings.totals, settings.group_size, settings.reference_length) == (None, None, None)


def test_every_option_arrives() -> None:
    totals = Totals(sequences=4, tokens=40, kl_tokens=30)
    settings = make_settings(
        0.5, (0.1, 0.3), surrogate="cispo", normalizer="fixed_length", max_length=9, group_size=2, totals=totals,
        reference_length=7.0, beta=0.25,
    )  # fmt: skip
    objective = settings.objective
    assert (objective.surrogate, objective.reduction, objective.max_length) == ("cispo", "fixed_length", 9)
    assert (objective.clip_low, objective.clip_high, objective.beta) == (0.1, 0.3, 0.25)
    assert (settings.totals, settings.group_size, settings.reference_length) == (totals, 2, 7.0)


@pytest.mark.parametrize(
    ("kl", "reads"),
    [
        (KLConfig(beta=0), (False, False)),
        (KLConfig(beta=0.1), (True, False)),
        (KLConfig(beta=0.1, kl_exclude_tokens=("special",)), (True, True)),
        (KLConfig(beta=0.1, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"), (False, False)),
    ],
    ids=["no KL", "a KL", "excluded tokens", "in the reward"],
)
def test_what_the_datums_must_hold(kl: KLConfig, reads: tuple[bool, bool]) -> None:
    settings = make_settings(kl=kl)
    assert (settings.reads_reference, settings.reads_exclusions) == reads


def test_a_plain_sum_is_a_mean_over_one_token() -> None:
    settings = make_settings(normalizer="token_sum")
    assert settings.objective.reduction == "token_mean"
    assert settings.totals == Totals(1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="token_sum"):
        make_settings(kl=KLConfig(beta=0.1, kl_normalizer="sequence_mean"), normalizer="token_sum")


def test_one_coefficient_under_two_names() -> None:
    kl = KLConfig(beta=0.3)
    assert merge_coefficients(KL_COEF, kl) is kl
    assert merge_coefficients(0.3, kl) is kl
    assert merge_coefficients(0.2, None).beta == 0.2
    with pytest.raises(ConfigError, match=r"kl_coef=0.2, kl.beta=0.3"):
        merge_coefficients(0.2, kl)
    assert merge_coefficients(KL_COEF, KLConfig(beta=0.7)).beta == 0.7, "a default that nobody gave is no conflict"


def test_the_value_of_a_controller_wins() -> None:
    assert in_force(KLConfig(beta=0.3), None) == 0.3
    assert in_force(KLConfig(beta=0.3), 0.1) == 0.1
    assert in_force(KLConfig(beta=0.3), 0) == 0.0


def test_the_reference_length_of_a_call_wins() -> None:
    kl = KLConfig(kl_clip_method="hard", kl_reference_length=50)
    assert reference_length_of(kl, None) == 50
    assert reference_length_of(kl, [1.0, 2.0]) == [1.0, 2.0]


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"kl_coef": x}, "kl_coef must be a number") for x in ("0.1", True, None, -0.1, math.nan, [0.1])),
    *(({"kl_coef": 0.1, "kl": x}, "kl must be a KLConfig") for x in ({"beta": 0.1}, "k3", KLConfig)),
    *(({"cliprange": x}, "cliprange must be a number, or two") for x in ("0.2", None, (0.1,), (0.1, 0.2, 0.3), {})),
    *(({"cliprange": x}, "clip_low must be a number") for x in (True, -0.1, 1.5, ("0.1", 0.2))),
    ({"cliprange": (0.1, "0.2")}, "clip_high must be a number"),
    *(({"beta": x}, "beta must be a number") for x in ("0.1", True, -1.0)),
    *(({"group_size": x}, "group_size must be a whole number") for x in (0, 1.5, True, "4")),
    *(({"max_length": x}, "max_length must be a whole number") for x in (0, 1.5, "4")),
    ({"totals": (4, 40, 40)}, "totals must be a Totals"),
    ({"totals": Totals(0, 4, 4)}, "totals.sequences must be a number > 0"),
    ({"kl": KLConfig(beta=0.1, kl_estimator="exact")}, "kl_estimator='exact' cannot be computed through Tinker"),
]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("options", "words"), BAD, ids=str)
def test_a_bad_option_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}") as caught:
        make_settings(**options)
    assert caught.value.got is not None and caught.value.why and caught.value.fix


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("options", "nearest"),
    [({"group_sise": 4}, "group_size"), ({"normalizer": "token_men"}, "token_mean"), ({"surrogate": "cisp"}, "cispo")],
)
def test_a_name_that_is_none_names_the_nearest(options: dict[str, Any], nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=nearest):
        make_settings(**options)


@pytest.mark.parametrize("length", ["50", True, 0, math.nan, [1.0], [1.0] * 9, {}, [None] * 4], ids=str)
def test_a_bad_reference_length_is_refused_with_the_datums(length: Any) -> None:
    """Reading is the last moment before anything is sent; an error inside a loss leaves the client unusable."""
    data, _ = fake_batch()
    with pytest.raises(KlampError, match="reference_length") as caught:
        make_settings(reference_length=length).read(data)
    assert caught.value.got is not None and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "length", [50, 50.0, [1.0, 2.0, 3.0, 4.0], torch.ones(4)], ids=["int", "float", "list", "tensor"]
)
def test_a_reference_length_for_all_or_for_each(length: Any) -> None:
    data, _ = fake_batch()
    assert len(make_settings(reference_length=length).read(data).lengths) == 4
