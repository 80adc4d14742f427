"""The configuration of a call: checked before any datum is read, honoured by the loss or named as without effect."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from tests.hosts.tinker.fakes import fake_batch

from klamp.config import KLConfig, KLWarning, LossConfig, TeacherConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.tinker.options import PLAIN_SUM, UNREAD, UNREAD_LOSS, make_settings
from klamp.tinker import compute_grpo_kl_loss, effective

IN_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}


def test_without_arguments_it_is_klamps_default() -> None:
    settings = make_settings()
    objective = settings.objective
    assert (objective.surrogate, objective.reduction, objective.beta) == ("ppo_clip", "token_mean", KLConfig.beta)
    assert (objective.clip_low, objective.clip_high, objective.max_length) == (0.2, 0.2, None)
    assert objective.kl == KLConfig().build_term() and not objective.trust.there
    assert (settings.totals, settings.group_size, settings.teacher) == (None, None, None)


def test_every_argument_arrives() -> None:
    totals, teacher = Totals(sequences=4, tokens=40, kl_tokens=30), TeacherConfig(teacher_model="t", teacher_coef=0.75)
    loss = LossConfig(surrogate="cispo", epsilon=0.1, epsilon_high=0.3, off_policy_mask_threshold=0.5)
    settings = make_settings(0.25, None, KLConfig(beta=0.5), loss, teacher, "loss_type", 9, 2, totals)
    objective = settings.objective
    assert (objective.surrogate, objective.reduction, objective.max_length) == ("cispo", "fixed_length", 9)
    assert (objective.clip_low, objective.clip_high, objective.beta) == (0.1, 0.3, 0.25)
    assert objective.trust == loss.trust and [each.coefficient for each in objective.others] == [0.75]
    assert (settings.totals, settings.group_size, settings.anchors) == (totals, 2, {"reference", "teacher"})
    assert make_settings(cliprange=(0.1, 0.3)).objective.clip_high == 0.3
    plain = make_settings(loss=loss, normalizer="token_sum")
    assert (plain.objective.reduction, plain.objective.surrogate, plain.totals) == ("token_mean", "cispo", PLAIN_SUM)


@pytest.mark.parametrize(
    ("kl", "anchors"),
    [
        (KLConfig(beta=0), set()),
        (KLConfig(beta=0.1), {"reference"}),
        (KLConfig(beta=0.1, reference="sampler"), {"sampler"}),
        (KLConfig(beta=0.1, **IN_REWARD), set()),
    ],
    ids=["no KL", "a KL", "to the sampler", "in the reward"],
)
def test_which_anchors_the_datums_must_hold(kl: KLConfig, anchors: set[str]) -> None:
    assert make_settings(kl=kl).anchors == anchors
    data, policies = fake_batch()
    if "reference" not in anchors:
        for datum in data:
            del datum.loss_fn_inputs["ref_logprobs"]
    compute_grpo_kl_loss(data, policies, kl=kl)


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"kl_coef": x}, "kl_coef must be a number") for x in ("0.1", True, -0.1, math.nan, [0.1])),
    *(({"kl": x}, "kl must be a KLConfig") for x in ({"beta": 0.1}, "k3", KLConfig)),
    *(({"loss": x}, "loss must be a LossConfig") for x in ({}, "ppo", KLConfig())),
    ({"teacher": "t"}, "teacher must be a TeacherConfig"),
    *(({"cliprange": x}, "cliprange must be a number, or two") for x in ("0.2", (0.1,), (0.1, 0.2, 0.3), {})),
    *(({"cliprange": x}, "clip_low must be a number") for x in (True, -0.1, 1.5, ("0.1", 0.2))),
    ({"cliprange": (0.1, "0.2")}, "clip_high must be a number"),
    ({"cliprange": 0.2, "loss": LossConfig()}, "cliprange and loss both give the bounds"),
    *(({"group_size": x}, "group_size must be a whole number") for x in (0, 1.5, True, "4")),
    *(({"max_length": x}, "max_length must be a whole number") for x in (0, 1.5, "4")),
    ({"totals": (4, 40, 40)}, "totals must be a Totals"),
    ({"totals": Totals(0, 4, 4)}, "totals.sequences must be a number > 0"),
    ({"kl": KLConfig(beta=0.1, kl_estimator="exact")}, "kl_estimator='exact' cannot be computed through Tinker"),
    (
        {"kl": KLConfig(beta=0.1, **IN_REWARD), "loss": LossConfig(scale_rewards="std")},
        "the KL in the reward cannot be",
    ),
    ({"kl": KLConfig(kl_normalizer="sequence_mean"), "normalizer": "token_sum"}, "normalizer='token_sum' cannot be"),
]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("arguments", "words"), BAD, ids=str)
def test_a_bad_argument_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}") as caught:
        make_settings(**arguments)
    assert caught.value.why and caught.value.fix
    with pytest.raises(UnknownNameError, match="token_sum"):
        make_settings(normalizer="token_sun")  # type: ignore[arg-type]


def notes(**arguments: Any) -> str:
    return "; ".join(effective(**arguments).notes)


def test_the_coefficient_is_the_one_of_the_call() -> None:
    (default,) = effective().terms
    (given,) = effective(0.3, kl=KLConfig(beta=0.04)).terms
    assert (default.beta, default.controller, given.beta) == (KLConfig.beta, "fixed", 0.3)
    assert "kl_coef" in given.controller
    assert effective(0.0).terms == () and "term       none" in str(effective(0.0)).splitlines()


def test_a_controller_or_schedule_moves_nothing_unless_the_caller_does() -> None:
    for kl in (KLConfig(target_kl=0.05), KLConfig(kl_schedule="linear"), KLConfig(kl_warmup_steps=3)):
        assert "nothing moves beta" in notes(kl=kl) and "nothing moves beta" not in notes(kl=kl, kl_coef=0.1)
    grows = TeacherConfig(teacher_model="t", teacher_schedule="cosine")
    assert "nothing moves teacher_coef" in notes(teacher=grows)
    assert notes(kl=KLConfig()) == ""


def test_a_kl_in_the_reward_is_the_callers_to_take() -> None:
    data, policies = fake_batch()
    plain, _ = compute_grpo_kl_loss(data, policies, 0.0)
    with pytest.warns(KLWarning, match="the loss adds nothing"):
        found, _ = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.3, **IN_REWARD))
    assert found.item() == plain.item()
    assert effective(kl=KLConfig(beta=0.3, **IN_REWARD)).terms[0].price == "0.3 reward per nat of a whole completion"


def test_price_average_and_clip_are_those_of_the_call() -> None:
    def price(**fields: Any) -> str:
        return effective(0.3, kl=KLConfig(beta=0.04, **fields)).terms[0].price

    assert price().startswith("0.3 reward per nat of a whole completion, if advantages are")
    assert price(kl_normalizer="token_mean") == price(), "the call's own"
    assert price(kl_normalizer="sequence_sum").startswith("unknown")
    fixed = effective(loss=LossConfig(), max_length=16, totals=Totals(1, 2, 2)).normalizer
    assert fixed.startswith("sum over tokens / (completions * 16)")
    assert effective(normalizer="token_sum").normalizer.startswith("sum over the tokens of the call")
    hard = KLConfig(kl_clip_method="hard", kl_reference_length=9, kl_exclude_tokens=("special",))
    assert effective(kl=hard).terms[0].clip == "hard clip at 0.5 nats x 9 tokens"
    assert "group_size" in notes(kl=hard) and "group_size" not in notes(kl=hard, group_size=4)
    assert "kl_mask" in notes(kl=hard)


CHANGED: dict[str, Any] = {
    "kl_early_stop": 0.5,
    "reference": "frozen",
    "reference_decay": 0.5,
    "reference_reset_steps": 7,
    "reference_device": "cpu",
    "reference_dtype": "bfloat16",
    "reference_url": "http://host:1",
    "reference_name": "start",
    "scale_rewards": "std",
    "advantage_baseline": "mean",
    "vllm_importance_sampling_mode": "token_mask",
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_that_no_call_reads_is_named_in_a_warning(name: str) -> None:
    assert {*UNREAD, *UNREAD_LOSS} <= CHANGED.keys() | {"reference_share"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        kl = KLConfig(**({name: CHANGED[name]} if name in UNREAD else {}))
        loss = LossConfig(loss_type="dapo", **({name: CHANGED[name]} if name in UNREAD_LOSS else {}))
    data, policies = fake_batch()
    plain, _ = compute_grpo_kl_loss(data, policies)
    with pytest.warns(KLWarning, match=f"without effect here: {name}"):
        found, _ = compute_grpo_kl_loss(data, policies, kl=kl, loss=loss)
    assert found.item() == plain.item()
    assert f"without effect here: {name}" in notes(kl=kl, loss=loss)
