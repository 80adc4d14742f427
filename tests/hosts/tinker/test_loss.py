"""klamp's loss at Tinker: its options, its numbers, and its gradient over the wire."""

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import tinker
import torch
from tests.config.drawn import FIELDS, accepted
from tests.hosts.tinker.fakes import column, fake_batch, slopes
from tests.hosts.tinker.wire import assert_same_gradient, by_autograd, datums, move, over_the_wire

from klamp import KLConfig, LossConfig
from klamp.config import KLWarning, TeacherConfig
from klamp.core.masking import Totals
from klamp.errors import ConfigError, DataError, NonFiniteError, ShapeError, UnknownNameError
from klamp.hosts.tinker.loss import PLAIN_SUM, LossCall
from klamp.tinker import compute_grpo_kl_loss, effective, forward_backward_kl
from klamp.tinker.testing import Fault

NAN, INF = math.nan, math.inf


def test_the_plain_sum_at_coefficient_0_is_the_built_in_ppo():
    """-sum(min(ratio A, clip(ratio, .8, 1.2) A)), as the service's documentation prints it."""
    data, policies = fake_batch()
    advantages, sampler = column(data, "advantages"), column(data, "logprobs")
    ratio = (torch.nn.utils.rnn.pad_sequence(policies, batch_first=True) - sampler).exp()
    for bound in (0.2, 0.05):
        expected = -torch.minimum(ratio * advantages, ratio.clamp(1 - bound, 1 + bound) * advantages).sum()
        loss, metrics = compute_grpo_kl_loss(data, policies, 0.0, bound, normalizer="token_sum")
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        given = {"retain_graph": True, "allow_unused": False}
        for found, right in zip(*(torch.autograd.grad(x, policies, **given) for x in (loss, expected)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)
        assert metrics["train/denominator"] == 1
    mean, metrics = compute_grpo_kl_loss(data, policies, 0.0, 0.05)
    assert metrics["train/denominator"] == 12 and mean.item() == pytest.approx(loss.item() / 12, rel=1e-12)


def test_a_datum_without_a_token_to_train_on_gets_zeros_and_no_nan():
    data, policies = fake_batch()
    rows = data[1].loss_fn_inputs
    rows |= {"mask": torch.zeros_like(rows["mask"]), "logprobs": torch.full_like(rows["logprobs"], NAN)}
    loss, metrics = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    loss.backward()
    assert torch.equal(policies[1].grad, torch.zeros_like(policies[1]))
    assert all(policy.grad is not None and bool(policy.grad.isfinite().all()) for policy in policies)
    assert metrics["train/denominator"] == 10


def test_what_stands_where_the_mask_is_0_does_not_matter():
    data, policies = fake_batch()
    before, _ = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    for datum in data:
        outside = datum.loss_fn_inputs["mask"] == 0
        for name in ("advantages", "logprobs", "ref_logprobs"):
            datum.loss_fn_inputs[name] = datum.loss_fn_inputs[name].masked_fill(outside, NAN)
    with torch.no_grad():
        for datum, policy in zip(data, policies, strict=True):
            policy[datum.loss_fn_inputs["mask"] == 0] = -INF
    after, _ = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    assert after.item() == before.item() and bool(slopes(after, policies).isfinite().all())


def test_the_reference_is_watched_at_coefficient_0_where_there_is_one():
    _, metrics = compute_grpo_kl_loss(*fake_batch(), kl_coef=0.0)
    assert metrics["kl/k3"] > 0 and "train/kl_penalty" not in metrics
    assert {type(value) for value in metrics.values()} == {float}


def test_a_gradient_that_overflows_is_refused_and_a_bound_of_the_log_ratio_helps():
    data, policies = fake_batch()
    with torch.no_grad():
        policies[1][-1] = -800.0
    with pytest.raises(NonFiniteError, match="datum 1: the gradient of the loss is not finite"):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_gradient="forward"))
    loss, metrics = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_gradient="reverse"))
    assert bool(loss.isfinite()) and bool(slopes(loss, policies).isfinite().all())
    assert metrics["kl/k3_saturated"] == pytest.approx(1 / 12)
    assert metrics["kl/k3"] == math.inf, "what is measured is not bounded"
    loss, metrics = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_max_log_ratio=20))
    assert metrics["kl/k3_saturated"] == 0 and bool(slopes(loss, policies).isfinite().all())
    assert metrics["kl/log_ratio_clamped"] == pytest.approx(1 / 12)


def test_a_clip_needs_whole_groups_and_a_reference_length():
    data, policies = fake_batch()
    clipped = KLConfig(beta=0.3, kl_clip_method="hard", kl_clip_threshold=0.1)
    known = replace(clipped, kl_reference_length=5)
    with pytest.raises(ShapeError, match="whole number of groups"):
        compute_grpo_kl_loss(data, policies, kl=known)
    with pytest.raises(ConfigError, match="needs a positive reference length"):
        compute_grpo_kl_loss(data, policies, kl=clipped, group_size=2)
    _, metrics = compute_grpo_kl_loss(data, policies, kl=known, group_size=2)
    assert metrics["kl/budget"] == pytest.approx(0.1 * 5)


CLIP = {"kl_clip_method": "hard", "kl_clip_threshold": 0.5, "use_per_token_kl_threshold": False}
CONFIGURATIONS = {
    "kl_coef": {"kl_coef": 0.3},
    "sequence": {"kl": KLConfig(beta=0.3, kl_horizon="sequence", kl_off_policy="sequence")},
    "clip": {"kl": KLConfig(beta=0.3, **CLIP), "group_size": 2, "loss": LossConfig(loss_type="grpo")},
    "advantage": {"kl": KLConfig(beta=0.3, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_gradient_over_the_wire_is_that_of_autograd(trainer, reference, standin, name):
    data, options = datums(reference), CONFIGURATIONS[name]
    move(trainer, data)
    with warnings.catch_warnings(action="error", category=FutureWarning):
        warnings.simplefilter("error", DeprecationWarning)
        result = forward_backward_kl(trainer, data, **options).result()
    value, expected = by_autograd(standin, data, functools.partial(compute_grpo_kl_loss, **options))
    assert_same_gradient(over_the_wire(standin), expected)
    assert result.metrics["train/loss"] == pytest.approx(value, abs=1e-6)
    assert result.metrics["kl/k3"] > 1e-3


def test_bad_data_is_refused_before_anything_is_sent(trainer, reference, standin):
    broken, asked = datums(reference), standin.requests["forward_backward"]
    del broken[2].loss_fn_inputs["ref_logprobs"]
    with pytest.raises(DataError, match="datum 2 has no 'ref_logprobs'"):
        forward_backward_kl(trainer, broken, 0.3)
    broken[2].loss_fn_inputs["ref_logprobs"] = tinker.TensorData.from_torch(torch.full((5,), math.nan))
    with pytest.raises(NonFiniteError, match="datum 2: ref_logprobs"):
        forward_backward_kl(trainer, broken, 0.3)
    assert standin.requests["forward_backward"] == asked


def test_nan_from_the_service_ends_the_step_and_names_the_datum(trainer, reference, standin):
    standin.inject(Fault(kind="nan", route="forward_backward"))
    with pytest.raises(NonFiniteError, match="datum 0: the policy's row"):
        forward_backward_kl(trainer, datums(reference), 0.3).result()
    assert all(tensor.grad is None for tensor in standin.weights().values())


def test_a_client_that_nobody_has_awaited_is_waited_for(service, standin, reference):
    pending = service.create_lora_training_client(base_model=standin.base_model, rank=4)
    asked = standin.requests["forward_backward"]
    assert forward_backward_kl(pending, datums(reference), 0.3).result().metrics["train/denominator"] == 10
    assert standin.requests["forward_backward"] > asked


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
    ({"loss": LossConfig(rollout_rs="seq_max_exact", rollout_rs_threshold=0.1)}, "rollout_rs='seq_max_exact' cannot"),
    ({"kl": KLConfig(beta=0.1, **IN_REWARD), "loss": LossConfig(scale_rewards="std")}, "the KL in the reward cannot"),
    ({"kl": KLConfig(kl_normalizer="sequence_mean"), "normalizer": "token_sum"}, "normalizer='token_sum' cannot be"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=str)
def test_a_bad_argument_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}") as caught:
        LossCall(**arguments)
    assert caught.value.why and caught.value.fix


def test_an_unknown_normalizer_is_refused() -> None:
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
    plain, _ = compute_grpo_kl_loss(*fake_batch(), 0.0)
    with pytest.warns(KLWarning, match="kl_placement='reward' has no effect"):
        loss, _ = compute_grpo_kl_loss(*fake_batch(), kl=KLConfig(beta=0.3, **IN_REWARD))
    assert loss.item() == plain.item()
    assert effective(kl=KLConfig(beta=0.3, **IN_REWARD)).terms[0].price == "0.3 reward per nat of a whole completion"


IGNORED = [(cls, field) for cls, field in FIELDS if "tinker" in field.metadata.get("ignored_by", ())]


@pytest.mark.parametrize(("cls", "field"), IGNORED, ids=[field.name for _, field in IGNORED])
def test_a_field_that_no_call_reads_is_named_in_a_warning(cls: Any, field: Any) -> None:
    plain, _ = compute_grpo_kl_loss(*fake_batch())
    given = {"loss": LossConfig(loss_type="dapo")}
    given |= {"kl": accepted(cls, field)} if cls is KLConfig else {"loss": accepted(cls, field, loss_type="dapo")}
    with pytest.warns(KLWarning, match=f"{field.name}=.* has no effect"):
        loss, _ = compute_grpo_kl_loss(*fake_batch(), **given)
    assert loss.item() == plain.item()
    assert f"{field.name}=" in notes(**given)
