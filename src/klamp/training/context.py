"""What all parts of a run share: configuration, models, task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from klamp.config import build_objective
from klamp.config.rules import SMALL_VOCABULARY
from klamp.core.objective import Objective
from klamp.core.types import Direction
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.rollout import excluded_ids
from klamp.scoring.scorer import Scorer
from klamp.tasks.base import Task
from klamp.training.config import TrainConfig
from klamp.training.references import Reference
from klamp.training.teachers import Teachers


@dataclass(kw_only=True)
class Context:
    """The shared parts of a run."""

    config: TrainConfig
    """The configuration in force."""
    output_dir: Path
    """The folder of the run."""
    policy: nn.Module
    """The model being trained."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer of the policy."""
    task: Task
    """The prompts and the reward."""
    stop: list[int]
    """The ids that end a completion."""
    vocabulary: int
    """The number of entries that the policy gives a logit to."""
    scorer: Scorer
    """The policy's scorer."""
    reference: Reference | None = None
    """The reference model; None where nothing here needs it."""
    original: Reference | None = None
    """The model that a moving reference started from; None where the reference does not move."""
    teachers: Teachers | None = None
    """Who scores as the second anchor; None where there is none."""
    objective: Objective = field(init=False)
    """The loss; its beta is the one at the start."""
    excluded: list[int] = field(init=False)
    """The ids of tokens that carry no KL."""
    control: KLControl = field(init=False)
    """beta and the reference length, as in every host."""

    def __post_init__(self) -> None:
        config = self.config
        length = config.rollout.max_completion_length
        self.objective = build_objective(config.kl, config.loss, max_length=length, teacher=config.teacher)
        self.excluded = excluded_ids(config.kl.kl_exclude_tokens, self.tokenizer)
        self.control = KLControl(config.kl)

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return next(self.policy.parameters()).device

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]

    @property
    def exact_completions(self) -> int:
        """How many completions of a group have their exact KL measured; all where the loss is made of it."""
        size, asked = self.config.rollout.num_generations, self.config.run.exact_kl_completions
        if self.config.kl.kl_estimator == "exact":
            return size
        if asked is not None:
            return min(asked, size)
        return size if self.vocabulary <= SMALL_VOCABULARY else 1

    @property
    def exact_everywhere(self) -> bool:
        """Whether those are all completions."""
        return self.exact_completions >= self.config.rollout.num_generations

    @property
    def exact_directions(self) -> tuple[Direction, ...]:
        """The directions of the exact KL that are measured; for a large vocabulary the reverse one only."""
        kl, asked = self.config.kl, self.config.run.exact_kl_completions
        in_loss = kl.kl_estimator == "exact" and kl.kl_gradient == "forward"
        if self.vocabulary <= SMALL_VOCABULARY or asked is not None or in_loss:
            return ("reverse", "forward")
        return ("reverse",)

    def parts(self, rows: int) -> Iterator[slice]:
        """The parts, nearly equal, that `rows` completions are computed in: gradient_accumulation_steps of them."""
        count = min(rows, self.config.optim.gradient_accumulation_steps)
        bounds = torch.linspace(0, rows, count + 1).round().long().tolist()
        return (slice(a, b) for a, b in pairwise(bounds) if b > a)
