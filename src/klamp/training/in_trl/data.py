"""A task in TRL's convention: a dataset of prompts, the order in which they come, a reward function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from klamp.hosts.common.rollout import LENGTH_COLUMN
from klamp.tasks.base import Task
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.rollouts import rewards_of
from klamp.training.sampling import examples_of_step

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE = "example"
"""The column that says which of the task's training prompts a row is."""


def dataset_of(task: Task) -> Dataset:
    """The training prompts as rows; the text of a prompt is what is tokenized, a chat template already applied."""
    from datasets import Dataset  # TRL's own: it is there with TRL

    return Dataset.from_dict(
        {
            "prompt": [example.prompt for example in task.train],
            EXAMPLE: list(range(len(task.train))),
            LENGTH_COLUMN: [example.reference_length for example in task.train],
        }
    )


class StepOrder(Sampler[int]):
    """The rows of all steps of a run, in the order of klamp's own loop.

    TRL draws the rows of a step anew for each part of each update, and uses the first: the completions of a prompt next
    to each other, as its own sampler has them.

    Args:
        config: the run.
        rows: how many prompts there are.
    """

    def __init__(self, config: TrainConfig, rows: int) -> None:
        self.config, self.rows = config, rows
        self.repeats = config.optim.num_iterations * config.optim.gradient_accumulation_steps

    def __iter__(self) -> Iterator[int]:
        """The rows."""
        rollout, run = self.config.rollout, self.config.run
        for step in range(run.max_steps):
            picked = examples_of_step(step, self.rows, size=rollout.prompts_per_step, seed=run.seed)
            for _ in range(self.repeats):
                for row in picked:
                    yield from [row] * rollout.num_generations

    def __len__(self) -> int:
        """How many rows that is."""
        rollout = self.config.rollout
        return self.config.run.max_steps * self.repeats * rollout.prompts_per_step * rollout.num_generations


def reward_function(context: Context) -> Callable[..., list[float]]:
    """The task's reward as TRL calls it; an error on one process is raised on all of them."""

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        examples = [context.task.train[row] for row in columns[EXAMPLE]]
        return rewards_of(context, examples, completions).tolist()

    return reward
