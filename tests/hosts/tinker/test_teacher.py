"""A KL to a teacher through the datums: klamp's own loss, the cookbook's advantage, at a real client's wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.hosts.teachers import HAVE, KINDS, SAMPLED
from tests.hosts.tinker.fakes import FakeDatum, column, fake_batch, slopes

from klamp import KLConfig, TeacherConfig
from klamp.config.describe import PLACEMENTS
from klamp.core.objective import Objective, Weighted, grpo_loss
from klamp.core.types import Batch
from klamp.errors import ConfigError, DataError
from klamp.tinker import compute_grpo_kl_loss, effective


def teacher(**fields: Any) -> TeacherConfig:
    return TeacherConfig(teacher_model="its name at the service", **{"teacher_coef": 0.7, **fields})


def taught() -> tuple[list[FakeDatum], list[torch.Tensor]]:
    """Datums of two anchors, and the policy's log-probabilities."""
    data, policies = fake_batch()
    others, _ = fake_batch(seed=5)
    rows = [other.loss_fn_inputs["ref_logprobs"] for other in others]
    return [
        FakeDatum({**datum.loss_fn_inputs, "teacher_logprobs": row}) for datum, row in zip(data, rows, strict=True)
    ], policies


FIELDS = [KINDS[name] for name in sorted(HAVE["Tinker"] & SAMPLED)]
FIELDS += [{"teacher_estimator": "k3", "teacher_off_policy": "token", "teacher_max_log_ratio": 0.3}]


@pytest.mark.parametrize("name", sorted(set(KINDS) - HAVE["Tinker"]))
def test_the_others_of_the_list_are_refused(name: str) -> None:
    data, policies = taught()
    with pytest.raises(ConfigError):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.0), teacher=teacher(**KINDS[name]))


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_it_is_the_loss_of_the_core(fields: dict[str, Any], beta: float) -> None:
    data, policies = taught()
    given, kl = teacher(**fields), KLConfig(beta=beta)
    batch = Batch(
        policy_logprobs=torch.nn.utils.rnn.pad_sequence(policies, batch_first=True),
        mask=column(data, "mask", boolean=True),
        advantages=column(data, "advantages"),
        old_logprobs=column(data, "logprobs"),
        sampler_logprobs=column(data, "logprobs"),
        ref_logprobs=column(data, "ref_logprobs"),
        teacher_logprobs=column(data, "teacher_logprobs"),
    )
    term = Weighted(0.7, given.build_term())
    expected = grpo_loss(batch, Objective(beta=beta, kl=kl.build_term(), reduction="token_mean", others=(term,)))
    loss, metrics = compute_grpo_kl_loss(data, policies, kl=kl, teacher=given)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(slopes(loss, policies), slopes(expected.loss, policies), rtol=1e-12, atol=1e-15)
    assert metrics["teacher/k1"] == pytest.approx(float(expected.metrics["teacher/k1"]), rel=1e-6)
    scheduled, _ = compute_grpo_kl_loss(data, policies, kl=kl, teacher=replace(given, teacher_coef=0.0))
    bare, _ = compute_grpo_kl_loss(data, policies, kl=kl)
    torch.testing.assert_close(scheduled, bare, rtol=1e-12, atol=0)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_shifted_by_the_caller_it_is_the_placement_advantage(horizon: str) -> None:
    """Advantages less coef (log sampler - log teacher), of each token or of it and all that follow; first update."""
    data, _ = taught()
    policies = [datum.loss_fn_inputs["logprobs"].clone().requires_grad_(True) for datum in data]
    config = teacher(teacher_placement="advantage", teacher_horizon=horizon)
    expected, _ = compute_grpo_kl_loss(data, policies, 0.0, teacher=config)
    for datum in data:
        rows = datum.loss_fn_inputs
        delta = (rows["logprobs"] - rows["teacher_logprobs"]) * rows["mask"]
        spent = delta if horizon == "token" else delta.flip(0).cumsum(0).flip(0)
        rows["advantages"] = rows["advantages"] - 0.7 * spent
    loss, _ = compute_grpo_kl_loss(data, policies, 0.0)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(slopes(loss, policies), slopes(expected, policies), rtol=1e-12, atol=1e-15)


def test_what_a_datum_cannot_tell_is_refused_in_words() -> None:
    data, policies = fake_batch()
    with pytest.raises(DataError, match="datum 0 has no 'teacher_logprobs'"):
        compute_grpo_kl_loss(data, policies, teacher=teacher())
    for estimator, head in (("exact", "student"), ("topk", "student"), ("topk", "union")):
        words = f"teacher_estimator='{estimator}' with teacher_head='{head}' cannot use a sampling client"
        with pytest.raises(ConfigError, match=words):
            compute_grpo_kl_loss(data, policies, teacher=teacher(teacher_estimator=estimator, teacher_head=head))


def test_effective_names_both_anchors() -> None:
    both = effective(kl=KLConfig(beta=0.02), teacher=teacher(teacher_estimator="k1", teacher_placement="advantage"))
    assert [term.beta for term in both.terms] == [0.02, 0.7]
    assert "to the teacher" in both.terms[1].term and "KL(policy||teacher)" in both.terms[1].gradient
    assert both.terms[1].placement == PLACEMENTS["advantage"]
    assert len(effective(kl_coef=0.0, teacher=teacher()).terms) == 1
