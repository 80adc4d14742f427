"""The learning rate of a run that goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from klamp.hosts.common.control import go_on_from


def schedule_to(last: int, rate: float = 1.0, updates: int = 1) -> LambdaLR:
    """A straight line from the rate to 0."""
    return LambdaLR(SGD([torch.zeros(1)], lr=rate), lambda count: 1 - count // updates / last)


def rates(schedule: LambdaLR, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def gone_on(schedule: LambdaLR, last: int, rate: float, **how) -> tuple[LambdaLR, str]:
    """As a new process goes on: made anew, the state loaded, then told."""
    new = schedule_to(last, rate, how.get("updates", 1))
    new.load_state_dict(copy.deepcopy(schedule.state_dict()) | {"lr_lambdas": [None]})
    return new, go_on_from(new, schedule.last_epoch, rate, **how)


def test_where_nothing_changed_the_rates_are_those_of_a_run_that_never_stopped():
    whole = rates(schedule_to(10), 10)
    begun = schedule_to(10)
    rates(begun, 4)
    again, said = gone_on(begun, 10, 1.0, warmup=3)
    assert rates(again, 6) == whole[4:] and not said


def test_a_lower_rate_counts_at_once():
    begun = schedule_to(10)
    rates(begun, 4)
    again, said = gone_on(begun, 10, 0.1, warmup=3)
    assert rates(again, 6) == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01]) and not said


@pytest.mark.parametrize("stops", [False, True])
def test_a_finished_run_goes_on_neither_at_0_nor_with_a_jump(stops):
    begun = schedule_to(4)
    rates(begun, 4)
    again, said = gone_on(begun, 8, 1.0, warmup=2)
    assert "from 0 to 0.5, over 2 steps" in said
    found = rates(again, 1)
    if stops:  # on the way up
        again, said = gone_on(again, 8, 1.0, warmup=2)
        assert not said
    assert found + rates(again, 3) == pytest.approx([0.25, 0.375, 0.25, 0.125])


def test_without_a_warm_up_it_is_said_that_the_rate_jumps_and_updates_of_a_step_have_one_rate():
    begun = schedule_to(2, updates=2)
    rates(begun, 4)
    again, said = gone_on(begun, 4, 2.0, updates=2)
    assert "from 0 to 1, at once" in said
    assert rates(again, 4) == [1.0, 1.0, 0.5, 0.5]
    begun, _ = gone_on(begun, 4, 2.0, updates=2, warmup=2)
    assert rates(begun, 4) == [0.5, 0.5, 0.5, 0.5]
