"""The options of the loss: each is checked before any datum is read, and becomes the core's objective."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.hosts.tinker.fakes import fake_batch

from klamp.config import KLConfig, KLWarning, TeacherConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError, KlampError, UnknownNameError
from klamp.hosts.tinker.options import (
    KL_COEF,
    UNREAD,
    LossOptions,
    Normalizer,
    make_settings,
    merge_coefficients,
)
from klamp.tinker import compute_grpo_kl_loss, effective


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
        reference_length=7.0, beta=0.25, teacher=TeacherConfig(teacher_model="t"), teacher_coef=0.75,
    )  # fmt: skip
    objective = settings.objective
    assert (objective.surrogate, objective.reduction, objective.max_length) == ("cispo", "fixed_length", 9)
    assert (objective.clip_low, objective.clip_high, objective.beta) == (0.1, 0.3, 0.25)
    assert (settings.totals, settings.group_size, settings.reference_length) == (totals, 2, 7.0)
    assert [each.coefficient for each in objective.others] == [0.75] and settings.reads_teacher
    assert len(LossOptions.__annotations__) == 9, "each is above"


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


PAGE = Path(__file__).resolve().parents[3] / "docs" / "tinker.md"
IN_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}


def notes(**arguments: Any) -> str:
    return "; ".join(effective(**arguments).notes)


def test_the_page_shows_what_it_prints() -> None:
    (code,) = re.findall(r"```python\n(from klamp import KLConfig\nfrom klamp.tinker import effective\n.*?)```",
                         PAGE.read_text(encoding="utf-8"), re.DOTALL)  # fmt: skip
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert "\n".join(said.getvalue().splitlines()[1:]) in PAGE.read_text(encoding="utf-8"), "but for the SDK's version"


def test_the_coefficient_is_the_one_of_the_call() -> None:
    (default,) = effective().terms
    (given,) = effective(kl=KLConfig(beta=0.04), beta=0.3).terms
    assert (default.beta, default.controller) == (KLConfig.beta, "fixed")
    assert (given.beta, given.controller) == (0.3, "the caller's: each call is passed its beta")
    assert effective(0.0).terms == () and "term       none" in str(effective(0.0)).splitlines()


def test_a_controller_or_schedule_moves_nothing_unless_the_caller_does() -> None:
    moving = [KLConfig(target_kl=0.05), KLConfig(kl_schedule="linear"), KLConfig(kl_warmup_steps=3)]
    for kl in moving:
        assert "nothing moves beta" in notes(kl=kl) and "nothing moves beta" not in notes(kl=kl, beta=0.1)
    assert notes(kl=KLConfig()) == ""


def test_the_price_is_that_of_advantages_which_the_caller_forms() -> None:
    def price(**fields: Any) -> str:
        return effective(kl=KLConfig(beta=0.04, **fields), beta=0.3).terms[0].price

    assert price().startswith(
        "0.3 reward per nat of a whole completion, if advantages are rewards less the mean of the"
    )
    assert price(kl_normalizer="token_mean") == price(), "the call's own"
    assert price(kl_normalizer="sequence_sum").startswith("unknown: the KL has an average of its own")
    assert price(**IN_REWARD) == "0.3 reward per nat of a whole completion"


def test_the_normalizer_of_a_call() -> None:
    said = {each: effective(normalizer=each, max_length=16).normalizer for each in get_args(Normalizer)}
    assert len(set(said.values())) == len(said) and all(repr(each) in text for each, text in said.items())
    assert said["fixed_length"].startswith("sum over tokens / (completions * 16)")
    assert "sequence_sum" in notes(kl=KLConfig(kl_normalizer="sequence_sum"))


@pytest.mark.parametrize(
    ("fields", "given", "clip"),
    [
        ({}, None, "hard clip at 0.5 nats per token of the reference length"),
        ({"kl_reference_length": 9}, None, "hard clip at 0.5 nats x 9 tokens"),
        ({"kl_reference_length": 9}, 4.0, "hard clip at 0.5 nats x 4 tokens"),
        ({"kl_reference_length": 9}, [4.0, 5.0], "hard clip at 0.5 nats x the datum's reference_length tokens"),
    ],
)
def test_the_length_that_the_call_is_given_is_the_one_in_force(fields: Any, given: Any, clip: str) -> None:
    kl = KLConfig(kl_clip_method="hard", **fields)
    (term,) = effective(kl=kl, reference_length=given, group_size=2).terms
    assert term.clip == clip
    in_force = make_settings(kl=kl, reference_length=given).reference_length
    assert in_force == (given or kl.kl_reference_length), "what the loss works with"


def test_where_the_kl_enters_elsewhere_it_says_what_else_is_to_be_done() -> None:
    (in_reward,) = effective(kl=KLConfig(**IN_REWARD)).terms
    assert in_reward.placement == "taken from the reward"
    assert "penalize_rewards" in notes(kl=KLConfig(**IN_REWARD))
    assert "shift_advantages" in notes(kl=KLConfig(kl_estimator="k1", kl_placement="advantage"))
    assert "kl_mask" in notes(kl=KLConfig(kl_exclude_tokens=("special",)))
    hard = KLConfig(kl_clip_method="hard")
    assert "group_size" in notes(kl=hard) and "group_size" not in notes(kl=hard, group_size=4)


CHANGED: dict[str, Any] = {
    "beta": 0.3,
    "kl_estimator": "k2",
    "kl_gradient": "forward",
    "kl_horizon": "sequence",
    "kl_clip_method": "hard",
    "kl_clip_threshold": 0.1,
    "use_per_token_kl_threshold": False,
    "kl_clip_temperature": 0.2,
    "kl_clip_level": "batch",
    "kl_reference_length": 7,
    "kl_max_log_ratio": 5.0,
    "kl_off_policy": "token",
    "kl_max_weight": 2.0,
    "kl_normalizer": "sequence_sum",
    "target_kl": 0.6,
    "kl_schedule": "linear",
    "kl_warmup_steps": 3,
    "kl_exclude_tokens": ("special",),
    "kl_early_stop": 0.5,
    "reference": "frozen",
    "reference_decay": 0.5,
    "reference_reset_steps": 7,
    "reference_device": "cpu",
    "reference_dtype": "bfloat16",
    "reference_url": "http://host:1",
    "reference_name": "start",
}
OF_THE_CONTROLLER = {"beta_min", "beta_max"} | {
    f"kl_controller_{name}" for name in ("gain", "lead", "factors", "horizon", "clip")
}


def quiet(**fields: Any) -> KLConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return KLConfig(**fields)


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_is_heard_by_the_loss_or_named(name: str) -> None:
    """None is passed over in silence; the ones that are said to be without effect have none."""
    kl = quiet(**{name: CHANGED[name]})
    changes_the_loss = make_settings(kl=kl) != make_settings(kl=KLConfig())
    assert changes_the_loss != (name in {*UNREAD, "target_kl", "kl_schedule", "kl_warmup_steps"})
    assert (f"without effect here: {name}" in notes(kl=kl)) == (name in UNREAD)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data, policies = fake_batch()
        with contextlib.suppress(KlampError):
            compute_grpo_kl_loss(data, policies, kl=kl, group_size=2, reference_length=7)
    assert changes_the_loss != any(name in str(each.message) or "beta=controller" in str(each.message) for each in said)


def test_there_is_no_field_but_these() -> None:
    elsewhere = OF_THE_CONTROLLER | {"kl_placement", "kl_controller", "kl_schedule_end", "kl_monitor"}
    assert {each.name for each in fields(KLConfig)} == CHANGED.keys() | elsewhere
