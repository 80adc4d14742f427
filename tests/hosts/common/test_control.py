"""beta in a host's loop: never 0 while the reference is wanted, the same after a checkpoint."""

from __future__ import annotations

import json

import pytest

from klamp.config import KLConfig
from klamp.errors import RunFolderError
from klamp.hosts.common.control import NEVER_ZERO, KLControl
from klamp.hosts.common.lr_guard import LearningRateGuard


def test_a_host_never_sees_zero_while_the_reference_is_wanted() -> None:
    assert KLControl(KLConfig(beta=0.0)).host_beta(0, 10) == 0.0
    assert KLControl(KLConfig(beta=0.0, kl_monitor=True)).host_beta(0, 10) == NEVER_ZERO > 0
    warming = KLControl(KLConfig(beta=0.2, kl_warmup_steps=4))
    assert (warming.beta(0, 10), warming.host_beta(0, 10)) == (0.0, NEVER_ZERO)
    assert warming.host_beta(2, 10) == warming.beta(2, 10) == pytest.approx(0.1)
    dual = KLControl(KLConfig(beta=0.01, kl_controller="dual", target_kl=1.0, kl_controller_lr=1.0))
    dual.update(0.0)
    assert (dual.beta(1, 10), dual.host_beta(1, 10)) == (0.0, NEVER_ZERO)


def test_a_checkpoint_continues_where_it_was() -> None:
    kl = KLConfig(beta=0.2, kl_controller="pid", target_kl=0.1, kl_lr_guard=0.05)
    whole, first, second = KLControl(kl), KLControl(kl), KLControl(kl)
    for value in (0.2, 0.3):
        whole.update(value)
        first.update(value)
    first.reference_length = 12.5
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in (0.05, 0.4):
        whole.update(value)
        second.update(value)
    assert second.beta(5, 10) == whole.beta(5, 10) != 0.2
    assert second.rate_factor == whole.rate_factor == 1.0  # the KL before was 0.05
    assert second.reference_length == 12.5
    with pytest.raises(RunFolderError, match="saved 'pid', configured 'fixed'"):
        KLControl(KLConfig(beta=0.2)).load_state_dict(first.state_dict())


def test_the_rate_of_a_step_goes_by_the_kl_of_the_step_before() -> None:
    control = KLControl(KLConfig(beta=0.2, kl_lr_guard=0.1))
    factors = []
    for kl in (0.4, 0.2, 0.01, float("nan"), 0.5):
        control.update(kl)
        factors.append(control.rate_factor)
    assert factors == [1.0, 0.25, 0.5, 1.0, 1.0]


def test_the_guard_puts_the_rate_back() -> None:
    class Optimizer:
        param_groups = ({"lr": 0.4}, {"lr": 0.2})

    optimizer, guard = Optimizer(), LearningRateGuard(lambda: 0.25)
    guard.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    guard.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.2]
