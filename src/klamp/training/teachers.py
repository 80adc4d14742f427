"""The teachers of a run: who scores its completions as the second anchor, after which prompt, with which KL.

A teacher is one of the references of `klamp.training.references`, told other prompts where the data has some. It sees
the completion's own token ids behind its prompt, in one row, so that the two models speak of the same tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from klamp.config.teacher import TeacherConfig
from klamp.errors import DataError, ModelError
from klamp.hosts.common.teachers import check_tokens, no_prompt, prefix_kl
from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import Predictions, check_same_vocabulary
from klamp.scoring.scorer import PrefixKL, Scorer, TeacherKL
from klamp.scoring.vllm_reference import Who
from klamp.tasks.base import Example, Task
from klamp.tasks.prompts import prompt_text
from klamp.training.config import TrainConfig
from klamp.training.models import load_model, load_tokenizer
from klamp.training.references import (
    AdapterOffReference,
    FrozenReference,
    LocalReference,
    MovingReference,
    Reference,
    connect,
    score_rows,
)
from klamp.training.sampling import encode_prompts


class LiveTeacher(LocalReference):
    """The policy as it is now, without gradient; it teaches what it knows behind another prompt."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    score = FrozenReference.score

    @property
    def model(self) -> nn.Module:
        """The policy."""
        return self.scorer.model

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """A context with the policy."""
        yield self.model

    def describe(self) -> str:
        """Where the teacher comes from, in words."""
        return "the policy itself"


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What the teachers of a rollout said of its B completions of T tokens."""

    logprobs: Tensor
    """[B, T] log-probabilities of the tokens, each under its own teacher."""
    scored: Tensor | None = None
    """[B, T] bool: tokens that got a number; None: all that are trained on."""
    parts: tuple[tuple[Tensor, Predictions], ...] = ()
    """Of each teacher, [B] bool the rows that it scored, and [R, T, ...] its predictions for them."""

    def mask(self, trained: Tensor) -> Tensor:
        """Which of the tokens that are trained on the teacher scored. [B, T]"""
        return trained if self.scored is None else trained & self.scored

    def asked(self, part: slice, how: PrefixKL, sampler: Tensor | None) -> tuple[TeacherKL, ...]:
        """What a scorer needs to measure the KL at each prefix of a part of the rollout.

        Args:
            part: which completions.
            how: which KL.
            sampler: [B, T] log-probabilities under who sampled, for the weight of the tail; None: the policy did.
        """
        found: list[TeacherKL] = []
        for rows, predictions in self.parts:
            first, count = int(rows[: part.start].sum()), int(rows[part].sum())
            if count:
                values = predictions.values[first : first + count]
                weighed = None if sampler is None else sampler[part]
                anchor = replace(predictions, values=values)
                found.append(TeacherKL(rows=rows[part], anchor=anchor, how=how, sampler=weighed))
        return tuple(found)


class Teachers:
    """All teachers of a run: one, or one for each value of the data's column.

    Args:
        config: says which KL, and where prompts and keys stand.
        models: key -> who scores; "" where there is one.
        prompts: a prompt -> the text that the teacher sees in its place; empty: the same.
        tokenizer: of the policy, which is the teachers' too.
    """

    def __init__(
        self,
        config: TeacherConfig,
        models: Mapping[str, Reference],
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, str],
    ) -> None:
        self.config, self.models, self.tokenizer, self.prompts = config, models, tokenizer, prompts
        self.how = prefix_kl(config)

    def key(self, example: Example) -> str:
        """Which of the teachers a prompt has."""
        return str(example.fields.get(self.config.teacher_key)) if self.config.teacher_key else ""

    def prompt(self, example: Example) -> str | None:
        """What the teacher sees in the place of a prompt; None: the row of a held-out one does not say."""
        return self.prompts.get(example.prompt) if self.config.teacher_prompt else example.prompt

    def completions(self, examples: Sequence[Example], given: Completions) -> Completions:
        """The same completions behind the prompts that the teacher sees."""
        if not self.prompts:
            return given
        ids, mask = encode_prompts([self.prompts[e.prompt] for e in examples], self.tokenizer, given.ids.device)
        return replace(given, prompt_ids=ids, prompt_mask=mask)

    def score(
        self, examples: Sequence[Example], given: Completions, *, temperature: float, parts: Sequence[slice]
    ) -> Taught:
        """Score a rollout: every row by its own teacher, whose numbers return to that row.

        Args:
            examples: the prompt of each completion.
            given: the completions.
            temperature: that of the sampler, for policy and teacher alike.
            parts: the micro-batches of the step.
        """
        logprobs, kept = torch.zeros(given.ids.shape, device=given.ids.device), list[tuple[Tensor, Predictions]]()
        keys, seen = [self.key(e) for e in examples], self.completions(examples, given)
        for key, model in self.models.items():
            rows = torch.tensor([each == key for each in keys], device=given.ids.device)
            keep = None if self.how is None else rows
            told, found = score_rows(model, seen, rows, temperature=temperature, parts=parts, keep=keep)
            logprobs[rows] = told[rows]
            kept += [] if found is None else [(rows, found)]
        return Taught(logprobs=logprobs, parts=tuple(kept))

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Called after every step, with the number of steps done; a moving teacher moves."""
        for model in self.models.values():
            model.after_step(policy, step)

    def weights(self) -> nn.Module | None:
        """The weights of a teacher that moves, which a checkpoint must hold."""
        return next((w for model in self.models.values() if (w := model.weights()) is not None), None)

    def describe(self) -> str:
        """Where the teachers come from, in words."""
        return ", ".join(f"{key}: {each.describe()}" if key else each.describe() for key, each in self.models.items())


def load_teachers(
    config: TrainConfig, scorer: Scorer, task: Task, tokenizer: PreTrainedTokenizerBase
) -> Teachers | None:
    """The teachers of a run, ready to score; None if it has none.

    Args:
        config: of the run.
        scorer: of its policy.
        task: its prompts.
        tokenizer: of its policy.

    Raises:
        ModelError: a teacher that cannot be loaded, or with other tokens than the policy.
        DataError: a prompt without its teacher's prompt or key.
    """
    kl = config.teacher
    if not kl.there:
        return None
    prompts = teacher_prompts(config, task, tokenizer)
    check_keys(config, task, kl.models)
    if kl.kind == "remote":
        seen = [replace(e, prompt=prompts.get(e.prompt, e.prompt)) for e in task.train]
        server = connect(config, replace(task, train=seen), tokenizer, who="teacher")
        return Teachers(kl, {"": server}, tokenizer=tokenizer, prompts=prompts)
    models = {key: _made(config, name, scorer, tokenizer) for key, name in kl.models.items()}
    return Teachers(kl, models, tokenizer=tokenizer, prompts=prompts)


def _made(config: TrainConfig, name: str, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> Reference:
    kl, policy = config.teacher, scorer.model
    if kl.kind == "live":
        return LiveTeacher(scorer)
    if kl.kind == "adapter_off":
        return AdapterOffReference(policy, traits=scorer.traits)
    if kl.kind in ("ema", "periodic"):
        decay, every = (kl.teacher_decay, None) if kl.kind == "ema" else (None, kl.teacher_reset_steps)
        return MovingReference(copy.deepcopy(policy), decay=decay, reset_steps=every, traits=scorer.traits)
    model = load_model(name, config.model.dtype)
    check_same_vocabulary(model, policy, who="teacher", larger=True)
    check_tokens_of(name, tokenizer)
    return FrozenReference(model.to(next(policy.parameters()).device), name=f"{name}, frozen")  # pyright: ignore[reportArgumentType]


def check_tokens_of(name: str, ours: PreTrainedTokenizerBase, *, who: Who = "teacher") -> None:
    """Refuse an anchor whose tokenizer gives other ids to the policy's tokens; see `check_tokens`."""
    theirs = None
    with suppress(ModelError):
        theirs = load_tokenizer(name)
    check_tokens(theirs, ours, name=name, who=who)


def teacher_prompts(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A prompt -> the prompt that the teacher sees; empty where it sees the same. Held-out ones may be without.

    Raises:
        DataError: a training row without it, or two of them of one prompt with two prompts for the teacher.
    """
    column, found = config.teacher.teacher_prompt, dict[str, str]()
    for row, example in enumerate(task.train if column else (), start=1):
        if column not in example.fields:
            raise no_prompt(column, example.fields)
        text = prompt_text(example.fields[column], config.task, tokenizer, where=f"{column} of prompt {row}")
        if found.setdefault(example.prompt, text) != text:
            raise DataError(
                "one prompt has two prompts for the teacher",
                got=repr(example.prompt[:200]),
                why="a completion of it could not say which of them the teacher answers",
                fix="make the prompts differ, or keep one of the rows",
            )
    for example in (each for rows in task.evaluation.values() for each in rows if column):
        if given := example.fields.get(column):
            text = prompt_text(given, config.task, tokenizer, where=f"{column} of a held-out prompt")
            found.setdefault(example.prompt, text)
    return found


def check_keys(config: TrainConfig, task: Task, models: Mapping[str, str]) -> None:
    """Refuse prompts whose key names no teacher.

    Raises:
        DataError: names the keys that there are.
    """
    column = config.teacher.teacher_key
    for example in task.train if column else ():
        key = str(example.fields.get(column))
        if key not in models:
            raise DataError(
                f"a prompt names a teacher that there is none of: {key!r}",
                got=f"{column}={key!r}, teacher_models={', '.join(models)}",
                why="its completions would be scored by nobody",
                fix=f"add {key}=MODEL to teacher_models, or repair the row",
            )
