"""A KL to a teacher through the datums: klamp's own loss, the cookbook's advantage, at a real client's wire."""

from typing import Any

import pytest
import torch
from tests.hosts.teachers import HAVE, KINDS
from tests.hosts.tinker.fakes import FakeDatum, fake_batch

from klamp import KLConfig, TeacherConfig
from klamp.errors import ConfigError, DataError
from klamp.tinker import compute_grpo_kl_loss


def teacher(**fields: Any) -> TeacherConfig:
    return TeacherConfig(teacher_model="its name at the service", **{"teacher_coef": 0.7, **fields})


def taught() -> tuple[list[FakeDatum], list[torch.Tensor]]:
    data, policies = fake_batch()
    for datum, other in zip(data, fake_batch(seed=5)[0], strict=True):
        datum.loss_fn_inputs["teacher_logprobs"] = other.loss_fn_inputs["ref_logprobs"]
    return data, policies


@pytest.mark.parametrize("name", sorted(set(KINDS) - HAVE["Tinker"]))
def test_the_others_of_the_list_are_refused(name: str) -> None:
    data, policies = taught()
    with pytest.raises(ConfigError):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.0), teacher=teacher(**KINDS[name]))


def test_what_a_datum_cannot_tell_is_refused_in_words() -> None:
    data, policies = fake_batch()
    with pytest.raises(DataError, match="datum 0 has no 'teacher_logprobs'"):
        compute_grpo_kl_loss(data, policies, teacher=teacher())
    for estimator, head in (("exact", "student"), ("topk", "student"), ("topk", "union")):
        words = f"teacher_estimator='{estimator}' with teacher_head='{head}' cannot use a sampling client"
        with pytest.raises(ConfigError, match=words):
            compute_grpo_kl_loss(data, policies, teacher=teacher(teacher_estimator=estimator, teacher_head=head))


def test_a_teacher_of_one_number_is_in_the_metrics() -> None:
    data, policies = taught()
    assert "teacher/repeated" not in compute_grpo_kl_loss(data, policies, teacher=teacher())[1]
    for datum in data:
        datum.loss_fn_inputs["teacher_logprobs"] = torch.zeros_like(datum.loss_fn_inputs["teacher_logprobs"])
    assert compute_grpo_kl_loss(data, policies, teacher=teacher())[1]["teacher/repeated"] == 1
