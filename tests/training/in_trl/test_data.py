"""Prompts, their order and rewards are those of klamp's own loop."""

from __future__ import annotations

import pytest
from tests.training.conftest import TINY

from klamp.errors import RewardError
from klamp.tasks.base import Example
from klamp.training.config import TrainConfig
from klamp.training.in_trl.trainer import EXAMPLE, StepOrder, dataset_of, reward_function
from klamp.training.trainer import Trainer


def test_rows_hold_the_prompts_as_they_stand(context_of):
    task = context_of().task
    rows = dataset_of(task).to_list()
    assert [row["prompt"] for row in rows] == [example.prompt for example in task.train]
    assert [row[EXAMPLE] for row in rows] == list(range(len(task.train)))
    assert {row["reference_length"] for row in rows} == {None}


def test_the_order_is_that_of_the_own_loop(context_of):
    context = context_of(max_steps=5)
    order = list(StepOrder(context.config, len(context.task.train)))
    assert len(order) == len(StepOrder(context.config, len(context.task.train))) == 5 * 3 * 4
    trainer = Trainer(context, [])
    for step in range(5):
        rows = order[step * 12 : (step + 1) * 12]
        assert [context.task.train[row].prompt for row in rows[::4]] == [e.prompt for e in trainer.prompts(step)]
        assert rows == [row for row in rows[::4] for _ in range(4)], "a group stands together"


def test_a_step_comes_anew_for_each_part_of_each_update():
    once = TrainConfig.from_flat({**TINY, "backend": "trl"})
    often = TrainConfig.from_flat({**TINY, "backend": "trl", "num_iterations": 2, "gradient_accumulation_steps": 3})
    plain, repeated = (list(StepOrder(config, 10)) for config in (once, often))
    assert len(repeated) == len(StepOrder(often, 10)) == 6 * len(plain)
    assert repeated[:72] == plain[:12] * 6
    assert repeated[72:84] == plain[12:24]


def test_a_reward_is_the_task_s(context_of):
    context = context_of()
    reward = reward_function(context)
    given = reward(["12", "x7", ""], example=[3, 3, 4], prompts=["", "", ""], trainer_state=None)
    examples = [context.task.train[i] for i in (3, 3, 4)]
    assert given == pytest.approx([context.task.score(e, t) for e, t in zip(examples, ["12", "x7", ""], strict=True)])
    assert len(set(given)) > 1


def test_a_reward_that_fails_is_an_error(context_of):
    context = context_of()

    def fails(example: Example, completion: str) -> float:
        raise RewardError("no reward")

    object.__setattr__(context.task, "score", fails)
    with pytest.raises(RewardError, match="no reward"):
        reward_function(context)(["1"], example=[0])
