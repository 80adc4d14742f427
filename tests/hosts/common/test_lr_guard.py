"""kl_lr_guard in a loop of transformers: the rate is lowered for the step alone."""

from __future__ import annotations

import pytest
import torch

from klamp.config import KLConfig
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.lr_guard import LearningRateGuard


def test_the_guard_puts_the_rate_back() -> None:
    class Optimizer:
        param_groups = ({"lr": 0.4}, {"lr": 0.2})

    optimizer, guard = Optimizer(), LearningRateGuard(lambda: 0.25)
    guard.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    guard.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.2]


def test_a_step_is_as_much_shorter_as_the_guard_says_and_the_schedule_does_not_notice() -> None:
    """A real optimizer under a real schedule, in the order in which transformers calls the guard."""
    control = KLControl(KLConfig(beta=0.1, kl_lr_guard=0.05))
    guard = LearningRateGuard(lambda: control.rate_factor)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    moved, rates = [], []
    for kl in (0.2, 0.1, 0.01):
        control.update(kl)
        weight.grad, before = torch.ones(1), weight.detach().clone()
        guard.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        optimizer.step()
        guard.on_optimizer_step(None, None, None, optimizer=optimizer)
        schedule.step()
        moved.append(float(before - weight.detach()))
        rates.append(schedule.get_last_lr()[0])
    assert moved == [1.0, pytest.approx(0.5 * 0.05 / 0.2), pytest.approx(0.25 * 0.05 / 0.1)]
    assert rates == [0.5, 0.25, 0.125]
