"""Samples and scores completions through the service, as padded tensors like those of klamp's trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from klamp.core.masking import check_logprobs
from klamp.errors import ConfigError
from klamp.hosts.tinker.reference import compute_reference_logprobs
from klamp.scoring.completions import Completions
from klamp.scoring.scores import Scores
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.sampling import encode_prompts
from klamp.training.service.connection import Connection


class TinkerReference:
    """A reference at the service: it gives log-probabilities of tokens, no logits.

    Args:
        connection: the session.
        client: a sampling client of the base model, of another one, or of a snapshot.
        name: where it comes from, in words.
    """

    def __init__(self, connection: Connection, client: Any, name: str) -> None:
        self.connection, self.client, self.name = connection, client, name

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """Ask the service for the reference's log-probabilities of the completions, at temperature 1.

        Raises:
            ModelError, NonFiniteError: see `compute_reference_logprobs`.
        """
        prompts, responses = token_lists(completions)
        seconds = self.connection.seconds
        rows = self.connection.ask(
            "score the completions under the reference",
            lambda: asyncio.run(compute_reference_logprobs(self.client, prompts, responses, timeout=seconds)),
        )
        return Scores(logits=None, logprobs=padded(rows, completions.ids.shape[1]))

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """Refuse: the weights are at the service; `measure_length` samples there.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a reference at the Tinker service is no model of this process", got=self.name)
        yield

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Does nothing: the reference never moves."""

    def weights(self) -> nn.Module | None:
        """None: the weights are at the service."""
        return None

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        return self.name


def token_lists(completions: Completions) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts and responses as lists of ids."""
    return kept_ids(completions.prompt_ids, completions.prompt_mask), kept_ids(completions.ids, completions.mask)


def kept_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of each row without its padding."""
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def padded(rows: Sequence[Sequence[float]], length: int) -> Tensor:
    """Rows of numbers as one tensor, padded with zeros on the right."""
    found = torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        found[i, : len(row)] = torch.tensor(row)
    return found


def sample(
    connection: Connection,
    client: Any,
    prompts: Sequence[list[int]],
    *,
    count: int,
    seeds: Sequence[int],
    **params: Any,
) -> list[list[Any]]:
    """Ask for `count` completions of each prompt, all at once.

    Args:
        connection: the session.
        client: a sampling client.
        prompts: token ids.
        count: sequences per prompt.
        seeds: one per prompt.
        params: of `tinker.SamplingParams`.

    Raises:
        ModelError: the service fails, or answers with another number of sequences.
    """
    types = connection.tinker

    def ask() -> list[Any]:
        futures = [
            client.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=count,
                sampling_params=types.SamplingParams(seed=seed, **params),
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [list(future.result().sequences) for future in futures]

    found = connection.ask("sample completions", ask)
    if any(len(group) != count for group in found):
        raise connection.failed("answered with another number of sequences", f"{count} wanted per prompt", "try again")
    return found


def collect(
    context: Context, connection: Connection, client: Any, examples: Sequence[Example], step: int
) -> Completions:
    """Sample a group of completions for every prompt of a step, at temperature 1.

    Raises:
        ModelError: the service fails.
        NonFiniteError: a sampled token without a log-probability.
    """
    rollout = context.config.rollout
    ids, mask = encode_prompts([e.prompt for e in examples], context.tokenizer, torch.device("cpu"))
    prompts = kept_ids(ids, mask)
    seeds = [seed_of(context.config.run.seed, step, i) for i in range(len(prompts))]
    size = rollout.num_generations
    groups = sample(connection, client, prompts, count=size, seeds=seeds, max_tokens=rollout.max_completion_length)
    rows = [sequence for group in groups for sequence in group]
    longest = max(1, *(len(row.tokens) for row in rows))
    tokens = padded([row.tokens for row in rows], longest).long()
    kept = torch.arange(longest) < torch.tensor([len(row.tokens) for row in rows])[:, None]
    logprobs = padded([row.logprobs or [torch.nan] * len(row.tokens) for row in rows], longest)
    check_logprobs("the sampler's log-probabilities", logprobs, kept)
    return Completions(
        prompt_ids=ids.repeat_interleave(size, 0),
        prompt_mask=mask.repeat_interleave(size, 0),
        ids=torch.where(kept, tokens, context.pad),
        mask=kept,
        sampler_logprobs=logprobs,
        ended=torch.tensor([row.stop_reason == "stop" for row in rows]),
    )


def seed_of(run: int, step: int, prompt: int) -> int:
    """A seed of its own for every prompt of every step."""
    return ((run * 1_000_003 + step + 1) * 1_000_003 + prompt) % 2**31
