"""The configuration of a call: checked before any datum is read, honoured by the loss or named as without effect."""

import math
from typing import Any

import pytest
from tests.config.drawn import FIELDS, accepted
from tests.hosts.tinker.fakes import fake_batch

from klamp.config import KLConfig, KLWarning, LossConfig, TeacherConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError, DataError, UnknownNameError
from klamp.hosts.tinker.loss import PLAIN_SUM, LossCall
from klamp.tinker import compute_grpo_kl_loss, effective

IN_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}


def test_every_argument_arrives_and_without_one_it_is_klamps_default() -> None:
    default = LossCall()
    objective = default.objective
    assert (objective.surrogate, objective.reduction, objective.beta) == ("ppo_clip", "token_mean", KLConfig.beta)
    assert (objective.clip_low, objective.clip_high, objective.max_length) == (0.2, 0.2, None)
    assert objective.terms[0].term == KLConfig().build_term() and not objective.trust.is_set
    totals, teacher = Totals(sequences=4, tokens=40, kl_tokens=30), TeacherConfig(teacher_model="t", teacher_coef=0.75)
    loss = LossConfig(surrogate="cispo", epsilon=0.1, epsilon_high=0.3, off_policy_mask_threshold=0.5)
    around = {"loss": loss, "teacher": teacher, "max_length": 9, "group_size": 2, "totals": totals}
    call = LossCall(0.25, None, KLConfig(beta=0.5), **around)
    objective = call.objective
    assert (objective.surrogate, objective.reduction, objective.max_length) == ("cispo", "fixed_length", 9)
    assert (objective.clip_low, objective.clip_high, objective.beta) == (0.1, 0.3, 0.25)
    assert objective.trust == loss.trust and [each.coefficient for each in objective.terms[1:]] == [0.75]
    assert (call.whole, call.group_size) == (totals, 2)
    plain = LossCall(loss=loss, normalizer="token_sum")
    assert (plain.objective.reduction, plain.objective.surrogate, plain.whole) == ("token_mean", "cispo", PLAIN_SUM)


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("kl", [KLConfig(beta=0), KLConfig(reference="sampler"), KLConfig(**IN_REWARD)])
def test_where_no_reference_is_read_the_datums_need_none(kl: KLConfig) -> None:
    data, policies = fake_batch()
    for datum in data:
        del datum.loss_fn_inputs["ref_logprobs"]
    compute_grpo_kl_loss(data, policies, kl=kl)
    with pytest.raises(DataError, match="ref_logprobs"):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1))


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"kl_coef": x}, "kl_coef must be a number") for x in ("0.1", -0.1, math.nan)),
    ({"kl": {"beta": 0.1}}, "kl must be a KLConfig"),
    ({"loss": "ppo"}, "loss must be a LossConfig"),
    ({"teacher": "t"}, "teacher must be a TeacherConfig"),
    *(({"cliprange": x}, "cliprange must be a number") for x in ("0.2", True, 1.5, (0.1, 0.2))),
    ({"cliprange": 0.2, "loss": LossConfig()}, "cliprange and loss both give the bounds"),
    ({"group_size": 0}, "group_size must be a whole number"),
    ({"max_length": 1.5}, "max_length must be a whole number"),
    ({"totals": (4, 40, 40)}, "totals must be a Totals"),
    ({"kl": KLConfig(beta=0.1, kl_estimator="exact")}, "kl_estimator='exact' cannot be honoured by Tinker"),
    ({"kl": KLConfig(beta=0.1, **IN_REWARD), "loss": LossConfig(scale_rewards="std")}, "the KL in the reward cannot"),
    ({"kl": KLConfig(kl_normalizer="sequence_mean"), "normalizer": "token_sum"}, "normalizer='token_sum' cannot be"),
]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("arguments", "words"), BAD, ids=str)
def test_a_bad_argument_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}") as caught:
        LossCall(**arguments)
    assert caught.value.why and caught.value.fix
    with pytest.raises(UnknownNameError, match="token_sum"):
        LossCall(normalizer="token_sun")  # type: ignore[arg-type]


def notes(**arguments: Any) -> str:
    return "; ".join(effective(**arguments).notes)


def test_the_words_are_those_of_the_call() -> None:
    (default,) = effective().terms
    (given,) = effective(0.3, kl=KLConfig(beta=0.04)).terms
    assert (default.beta, default.controller, given.beta) == (KLConfig.beta, "fixed", 0.3)
    assert "kl_coef" in given.controller
    assert effective(0.0).terms == () and "term       none" in str(effective(0.0)).splitlines()
    assert given.price.startswith("0.3 reward per nat of a whole completion, if advantages are")
    own = KLConfig(kl_normalizer="sequence_sum", kl_clip_method="hard", kl_reference_length=9)
    assert effective(kl=own).terms[0].price.startswith("unknown")
    assert effective(kl=own).terms[0].clip == "hard clip at 0.5 nats x 9 tokens"
    assert "completions * max_length" in effective(loss=LossConfig(), max_length=16).normalizer
    assert effective(normalizer="token_sum").normalizer == "sum over the tokens of the call"


def test_a_controller_or_schedule_moves_nothing_unless_the_caller_does() -> None:
    for kl in (KLConfig(target_kl=0.05), KLConfig(kl_schedule="linear"), KLConfig(kl_warmup_steps=3)):
        assert "kl_coef=controller.value" in notes(kl=kl) and notes(kl=kl, kl_coef=0.1) == ""
    grows = TeacherConfig(teacher_model="t", teacher_schedule="cosine")
    assert "teacher_coef=teacher.coefficient" in notes(teacher=grows)
    assert notes(kl=KLConfig()) == ""


def test_a_kl_in_the_reward_is_the_callers_to_take() -> None:
    data, policies = fake_batch()
    plain, _ = compute_grpo_kl_loss(data, policies, 0.0)
    with pytest.warns(KLWarning, match="kl_placement='reward' has no effect"):
        found, _ = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.3, **IN_REWARD))
    assert found.item() == plain.item()
    assert effective(kl=KLConfig(beta=0.3, **IN_REWARD)).terms[0].price == "0.3 reward per nat of a whole completion"


IGNORED = [(cls, field) for cls, field in FIELDS if "tinker" in field.metadata.get("ignored_by", ())]


@pytest.mark.parametrize(("cls", "field"), IGNORED, ids=[field.name for _, field in IGNORED])
def test_a_field_that_no_call_reads_is_named_in_a_warning(cls: Any, field: Any) -> None:
    name, changed = field.name, accepted(cls, field, loss_type="dapo") if cls is LossConfig else accepted(cls, field)
    kl, loss = (changed, LossConfig(loss_type="dapo")) if cls is KLConfig else (KLConfig(), changed)
    data, policies = fake_batch()
    plain, _ = compute_grpo_kl_loss(data, policies)
    with pytest.warns(KLWarning, match=f"{name}=.* has no effect"):
        found, _ = compute_grpo_kl_loss(data, policies, kl=kl, loss=loss)
    assert found.item() == plain.item()
    assert f"{name}=" in notes(kl=kl, loss=loss)
