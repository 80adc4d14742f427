"""The order of prompts follows from seed and step, and holds every prompt once in an epoch."""

from __future__ import annotations

from klamp.training.order import examples_of_step


def test_every_epoch_holds_every_prompt_once():
    picked = [row for step in range(10) for row in examples_of_step(step, 10, size=3, seed=0)]
    epochs = [picked[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_more_prompts_than_there_are_come_again():
    assert sorted(examples_of_step(0, 2, size=5, seed=0)[:4]) == [0, 0, 1, 1]


def test_another_seed_is_another_order():
    assert examples_of_step(4, 100, size=9, seed=0) == examples_of_step(4, 100, size=9, seed=0)
    assert examples_of_step(4, 100, size=9, seed=0) != examples_of_step(4, 100, size=9, seed=1)
