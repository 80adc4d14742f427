"""klamp's trainer with the weights at a Tinker service: its steps, its evaluation, the length of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, zeros

from klamp.core.objective import Objective
from klamp.errors import KlampError
from klamp.scoring.completions import Completions
from klamp.tasks.base import Example
from klamp.training import checkpoint
from klamp.training.context import Context
from klamp.training.evaluation import Evaluation, evaluated, probabilities
from klamp.training.observers import Observer, RunInfo
from klamp.training.rollouts import LENGTH_PROMPTS, Rollout, kl_weights, needs_reference_length, rate
from klamp.training.sampling import encode_prompts
from klamp.training.service import rollout as rollouts
from klamp.training.service.connection import Connection
from klamp.training.service.rollout import TinkerReference, kept_ids, sample, seed_of
from klamp.training.service.update import update
from klamp.training.trainer import Trainer
from klamp.training.updates import UpdateOutput

LAST_WAIT = 60.0
"""Longest wait in seconds for the state to be saved after an error: the service may be the reason for it."""


class RemoteWeights(nn.Module):
    """A stand-in for a policy whose weights are elsewhere; its one number carries the learning-rate schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(zeros(1))


class TinkerTrainer(Trainer):
    """klamp's trainer, with sampling, gradients, evaluation and checkpoints at the service."""

    step_zero_kl = 0.01  # sampler and trainer of a service are not the same kernels

    def __init__(self, context: Context, observers: Sequence[Observer], connection: Connection, client: Any) -> None:
        super().__init__(context, observers)
        self.connection, self.client = connection, client
        self._snapshot: Any = None
        self._saved: tuple[int, str] | None = None

    def sampler(self) -> Any:
        """A sampling client of the present weights; it is kept until they change."""
        if self._snapshot is None:
            self._snapshot = self.connection.ask(
                "take a snapshot to sample from", self.client.save_weights_and_get_sampling_client
            )
        return self._snapshot

    def collect(self, beta: float) -> Rollout:
        """Sample and rate the completions of this step; the sampler is the old policy of the ratios."""
        examples = self.prompts(self.step)
        completions = rollouts.collect(self.context, self.connection, self.sampler(), examples, self.step)
        size = self.context.config.rollout.num_generations
        chosen = [example for example in examples for _ in range(size)]
        return rate(
            self.context,
            chosen,
            completions,
            beta=beta,
            old_logprobs=completions.sampler_logprobs,
            kl_weight=kl_weights(self.context, len(chosen), step=self.step),
        )

    def update(self, rollout: Rollout, objective: Objective) -> UpdateOutput:
        """Do one optimizer step with a rollout."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._snapshot = None
        return update(
            self.connection,
            self.client,
            self.context,
            rollout,
            objective,
            rate=learning_rate,
            before_step=self.optimizer.step,  # moves nothing here; notes that the weights are between two steps
        )

    def examine(self) -> Evaluation:
        """Every skill's score now, and some answers."""
        return evaluate(self.context, self.connection, self.sampler())

    def save(self) -> Path | None:
        """Save weights and optimizer at the service, and the run's state with their path in the folder."""
        if self.saved[0] == self.step:
            return self.saved[1]
        if self._saved is None or self._saved[0] != self.step:
            name = f"{self.context.output_dir.name}-step-{self.step:06d}"
            self._saved = (self.step, self.connection.ask("save the state", lambda: self.client.save_state(name)).path)
        state = self._state() | {"tinker_path": self._saved[1]}
        keep = self.context.config.run.keep_checkpoints
        folder = checkpoint.write(self.context.output_dir, self.step, _nothing, state=state, keep=keep)
        self.saved = (self.step, folder)
        self.tell(lambda o: o.on_checkpoint(self.step, folder))
        return folder

    def _keep(self) -> tuple[int, Path | None]:
        """The step to continue from and its checkpoint; if the service fails now too, the newest one in the folder."""
        self.connection.seconds = min(self.connection.seconds, LAST_WAIT)
        try:
            return super()._keep()
        except KlampError:
            self.whole = False
            return super()._keep()

    def resume(self) -> None:
        """Continue from the newest checkpoint; the client has its weights already."""
        folder = checkpoint.newest(self.context.output_dir)
        if folder is not None:
            self.load(folder)

    def info(self) -> RunInfo:
        """What is known of the run before its first step; the service does not say how many weights there are."""
        return replace(super().info(), parameters=0, trainable_parameters=0, device=f"Tinker, {self.connection.where}")


def _nothing(folder: Path) -> None:
    """Does nothing, where klamp's own trainer would write weights into the folder."""


def evaluate(context: Context, connection: Connection, client: Any) -> Evaluation:
    """Decode every held-out prompt greedily from the client's weights and score it (or read it there)."""
    policy = TinkerReference(connection, client, "the policy")

    def logprobs(given: Completions) -> Tensor:
        return policy.score(given, temperature=1.0).logprobs

    return evaluated(
        context,
        write=lambda examples: _completed(context, connection, client, examples),
        read=lambda examples: probabilities(examples, context.tokenizer, torch.device("cpu"), logprobs),
    )


def _completed(context: Context, connection: Connection, client: Any, examples: Sequence[Example]) -> list[str]:
    """Greedy completions."""
    groups = _answers(context, connection, client, examples, temperature=0.0)
    return context.tokenizer.batch_decode([row.tokens for (row,) in groups], skip_special_tokens=True)


def measure_length(context: Context, connection: Connection) -> None:
    """Measure and set the run's reference length, where a clip needs one: 64 completions of the reference."""
    reference = context.reference
    if not isinstance(reference, TinkerReference) or not needs_reference_length(context):
        return
    groups = _answers(context, connection, reference.client, context.task.train[:LENGTH_PROMPTS], temperature=1.0)
    context.control.reference_length = sum(len(row.tokens) for (row,) in groups) / len(groups)


def _answers(
    context: Context, connection: Connection, client: Any, examples: Sequence[Example], *, temperature: float
) -> list[list[Any]]:
    """One completion for each example's prompt."""
    if not examples:
        return []
    ids, mask = encode_prompts([e.prompt for e in examples], context.tokenizer, torch.device("cpu"))
    return sample(
        connection,
        client,
        kept_ids(ids, mask),
        count=1,
        seeds=[seed_of(context.config.run.seed, -1, i) for i in range(len(examples))],
        max_tokens=context.config.rollout.max_completion_length,
        temperature=temperature,
    )
