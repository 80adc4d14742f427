"""What a step asks of a service: completions, log-probabilities, and klamp's loss of them, as padded tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from klamp.core.masking import check_logprobs
from klamp.core.objective import Objective, grpo_loss
from klamp.core.topk import asked_tokens
from klamp.errors import KlampError
from klamp.hosts.tinker.loss import told_kl
from klamp.hosts.tinker.reference import compute_reference_logprobs, compute_teacher_head
from klamp.scoring.completions import Completions, kept_ids
from klamp.scoring.scorer import Scores, told_scores
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.references import Reference
from klamp.training.rollouts import Rollout
from klamp.training.sampling import encode_prompts
from klamp.training.service.connection import Connection
from klamp.training.updates import batch_of, by_teacher, head_means, not_finite, taught_of


class TinkerReference(Reference):
    """Weights at the service that sample and score: a reference, a teacher, the policy; no logits.

    Args:
        connection: the session.
        client: a sampling client of the base model, of another one, or of a snapshot.
        name: where it comes from, in words.
        top_k: of a teacher whose KL is over a head: how many of its likeliest tokens that has.
        vocabulary: entries of the policy, where a teacher may have more.
    """

    def __init__(
        self, connection: Connection, client: Any, name: str, *, top_k: int | None = None, vocabulary: int | None = None
    ) -> None:
        self.connection, self.client, self.name = connection, client, name
        self.top_k, self.vocabulary = top_k, vocabulary

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """Ask the service for the log-probabilities of the completions, at temperature 1, and for those of a head.

        Raises:
            ModelError, NonFiniteError: see `compute_reference_logprobs`.
        """
        given, seconds, k = token_lists(completions), self.connection.seconds, self.top_k
        ask: Callable[..., Any] = compute_reference_logprobs
        if k is not None:
            ask = partial(compute_teacher_head, top_k=k, vocabulary=self.vocabulary)
        rows = self.connection.ask(
            f"score the completions under {self.name}",
            lambda: asyncio.run(ask(self.client, *given, timeout=seconds)),
        )
        if k is not None:
            return told_scores(rows, completions, k)
        return Scores(logits=None, logprobs=padded(rows, completions.ids.shape[1]))

    def sample(
        self, prompts: Sequence[list[int]], *, count: int, seeds: Sequence[int], **params: Any
    ) -> list[list[Any]]:
        """Ask for `count` completions of each prompt, all at once.

        Args:
            prompts: token ids.
            count: sequences per prompt.
            seeds: one per prompt.
            params: of `tinker.SamplingParams`.

        Raises:
            ModelError: the service fails, or answers with another number of sequences.
        """
        types = self.connection.tinker

        def ask() -> list[Any]:
            futures = [
                self.client.sample(
                    prompt=types.ModelInput.from_ints(prompt),
                    num_samples=count,
                    sampling_params=types.SamplingParams(seed=seed, **params),
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            return [list(future.result().sequences) for future in futures]

        found = self.connection.ask("sample completions", ask)
        if any(len(group) != count for group in found):
            got = f"{count} wanted per prompt"
            raise self.connection.failed("answered with another number of sequences", got, "try again")
        return found

    def answers(self, context: Context, examples: Sequence[Example], *, temperature: float) -> list[list[int]]:
        """The tokens of one completion for each example's prompt."""
        if not examples:
            return []
        ids, mask = encode_prompts([e.prompt for e in examples], context.tokenizer, context.device)
        seeds = [seed_of(context.config.run.seed, -1, i) for i in range(len(examples))]
        longest = context.config.rollout.max_completion_length
        groups = self.sample(kept_ids(ids, mask), count=1, seeds=seeds, max_tokens=longest, temperature=temperature)
        return [row.tokens for (row,) in groups]

    def describe(self) -> str:
        """Where the weights come from, in words."""
        return self.name


def token_lists(completions: Completions) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts and responses as lists of ids."""
    return kept_ids(completions.prompt_ids, completions.prompt_mask), kept_ids(completions.ids, completions.mask)


def padded(rows: Sequence[Sequence[float]], length: int) -> Tensor:
    """Rows of numbers as one tensor, padded with zeros on the right."""
    found = torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        found[i, : len(row)] = torch.tensor(row)
    return found


def collect(context: Context, policy: TinkerReference, examples: Sequence[Example], step: int) -> Completions:
    """Sample a group of completions for every prompt of a step, at temperature 1.

    Raises:
        ModelError: the service fails.
        NonFiniteError: a sampled token without a log-probability.
    """
    rollout = context.config.rollout
    ids, mask = encode_prompts([e.prompt for e in examples], context.tokenizer, context.device)
    prompts = kept_ids(ids, mask)
    seeds = [seed_of(context.config.run.seed, step, i) for i in range(len(prompts))]
    size = rollout.num_generations
    groups = policy.sample(prompts, count=size, seeds=seeds, max_tokens=rollout.max_completion_length)
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


class PartLoss:
    """The loss of some completions, in the form that `forward_backward_custom` calls on a thread of its own.

    An error in here would leave the client of newer SDKs unusable, and the state could not be saved any more: it is
    kept for who asked, and the gradient is zero.
    """

    def __init__(self, context: Context, rollout: Rollout, part: slice, objective: Objective) -> None:
        self.context, self.rollout, self.part, self.objective = context, rollout, part, objective
        self.prompts, self.responses = (rows[part] for rows in token_lists(rollout.completions))
        self.logprobs = torch.zeros(len(self.prompts), rollout.mask.shape[1])
        self.told = self._told()
        self.metrics: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.error: KlampError | None = None

    def _told(self) -> Tensor:
        """Of each token the ids and log-probabilities of its teacher's likeliest, and last its own. [b, T, K + 1, 2]"""
        shape = self.logprobs.shape
        found = torch.stack([self.rollout.completions.ids[self.part].float(), torch.zeros(shape)], -1)[:, :, None]
        for each in taught_of(self.context, self.rollout, self.part):
            values = each.anchor.values
            found = found if found.shape[2:] == values.shape[2:] else torch.zeros(*shape, *values.shape[2:])
            found[each.rows] = values
        return found

    @property
    def rows(self) -> list[int]:
        """The completions that hold a token; empty ones cannot be sent, and nothing is trained on them."""
        return [i for i, response in enumerate(self.responses) if response]

    def datums(self, tinker: Any) -> list[Any]:
        """What is sent to the service: input and target tokens, and a teacher's head; the loss has all else here."""
        found, k = [], self.told.shape[2] - 1
        for i in self.rows:
            full = [*self.prompts[i], *self.responses[i]]
            head = torch.full((len(full) - 1, k), -1)
            head[len(self.prompts[i]) - 1 :] = self.told[i, : len(self.responses[i]), :-1, 0].long()
            targets = torch.tensor(full[1:])
            inputs = {"target_tokens": tinker.TensorData.from_torch(asked_tokens(targets, head) if k else targets)}
            found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs))
        return found

    def __call__(self, data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, with its gradient in the log-probabilities, and no metrics."""
        try:
            wide = self._response_part(logprobs_list)
            self.logprobs = wide.detach()[..., -1]
            scores, given = self._scores(wide), (self.context, self.rollout, self.part)
            batch = batch_of(*given, scores, self.objective)
            loss, metrics = grpo_loss(batch, self.objective, totals=self.rollout.totals)
            metrics |= {"train/loss": loss.detach(), **head_means(batch, scores)}
            self.metrics = {name: float(value) for name, value in metrics.items()}
            self.sums = {name: float(value) for name, value in by_teacher(*given, batch, scores).items()}
            if not torch.isfinite(loss):
                raise not_finite("the loss is not finite", f"loss {float(loss.detach())}")
        except KlampError as error:
            self.error = error
            loss = torch.stack([torch.where(torch.zeros_like(x).bool(), x, 0.0).sum() for x in logprobs_list]).sum()
        return loss, {}

    def _scores(self, wide: Tensor) -> Scores:
        """The policy's log-probabilities, and its KL to the teacher where that is over a head."""
        if self.context.teachers is None or self.context.teachers.how is None:
            return Scores(logprobs=wide[..., -1])
        ids, anchor = self.told[..., 0].long(), self.told[..., 1]
        sampler = self.rollout.completions.sampler_logprobs[self.part]
        kl, head = told_kl(wide, anchor, ids, self.context.config.teacher, sampler)
        return Scores(logprobs=wide[..., -1], teacher=kl, head=head)

    def _response_part(self, logprobs_list: Sequence[Tensor]) -> Tensor:
        """The log-probabilities of the responses out of those of whole sequences, [b, T, K + 1], with gradient."""
        found = torch.zeros(self.told.shape[:-1])
        for i, row in zip(self.rows, logprobs_list, strict=True):
            found[i, : len(self.responses[i])] = row[len(self.prompts[i]) - 1 :].view(-1, found.shape[2])
        return found
