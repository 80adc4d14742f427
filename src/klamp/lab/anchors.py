"""The anchors of a run: the reference and the teachers, models that score its completions without gradient.

A teacher may see another prompt. The completion's own token ids follow it, so both models score the same tokens.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from klamp.config.teacher import TeacherConfig
from klamp.errors import DataError, KLWarning, ModelError
from klamp.hosts.common.anchors import check_tokens, no_prompt, prefix_kl
from klamp.lab.config import TrainConfig, reference_kind
from klamp.lab.models import device_of, load_model, load_policy, load_tokenizer, max_length
from klamp.lab.sampling import encode_prompts
from klamp.lab.tasks.base import Example, Task
from klamp.lab.tasks.files import check_prompts, prompt_text
from klamp.scoring import vllm_reference
from klamp.scoring.completions import Completions, select
from klamp.scoring.model_parts import Predictions, Traits, check_same_vocabulary, output_size
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, Scorer, Scores, pad_tokens
from klamp.scoring.vllm_reference import VLLMReference, Who


class LocalReference:
    """An anchor with its weights on this machine; `adapter_off`: the policy with its LoRA adapter switched off."""

    def __init__(self, model: nn.Module, *, traits: Traits | None = None, adapter_off: bool = False) -> None:
        self.model, self.adapter_off = model, adapter_off
        self.scorer = Scorer(model, probe(model) if traits is None else traits)

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """A context with the model, ready to score and to generate."""
        with self.model.disable_adapter() if self.adapter_off else nullcontext():  # pyright: ignore[reportCallIssue]
            yield self.model

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """The scores of completions, with predictions for the rows `keep`, [B] bool."""
        with self.sampling_model():
            return self.scorer(completions, Ask(temperature=temperature, keep=keep))


Reference: TypeAlias = LocalReference | VLLMReference


class MovingReference(LocalReference):
    """A copy of the policy that follows it: by averaging (`decay`), or by copying it every `reset_steps`.

    Equation: ema ref <- decay ref + (1 - decay) policy after every step; periodic ref <- policy.
    The average is float32 beside a model in 16 bits: bfloat16 would round a hundredth of a small distance away.
    A KL to a moving reference does not bound the distance from the start; the trainer logs the KL to `original` too.

    Source: EMA-PG arXiv:2602.04417 (ema)
    """

    original: LocalReference | None = None  # the model that a moving reference started from; None: a teacher

    def __init__(
        self, model: nn.Module, *, decay: float | None = None, reset_steps: int | None = None, **options: Any
    ) -> None:
        learned = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
        wide = decay is None or all(p.dtype in (torch.float32, torch.float64) for p in learned)
        super().__init__(model.requires_grad_(False).eval(), **options)
        self.decay, self.reset_steps = decay, reset_steps
        self.average = self.model if wide else copy.deepcopy(self.model).float()
        self.average.register_load_state_dict_post_hook(lambda *_: self._round())  # a checkpoint holds the average

    @torch.no_grad()
    def after_step(self, policy: nn.Module, step: int) -> None:
        """Follow the policy, once `step` steps are done."""
        if self.decay is None and (self.reset_steps is None or step % self.reset_steps):
            return
        share = 1.0 if self.decay is None else 1.0 - self.decay
        for mine, theirs in zip(self.average.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine), share)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self.average is not self.model:
            for rounded, mine in zip(self.model.parameters(), self.average.parameters(), strict=True):
                rounded.copy_(mine)


class RowPredictions(NamedTuple):
    """What an anchor predicts for some of B completions."""

    rows: Tensor  # [B] bool: the completions
    predictions: Predictions  # [R, T, ...]

    def part(self, part: slice) -> RowPredictions | None:
        """Those for a part of the batch; None if it has none of the completions."""
        first, count = int(self.rows[: part.start].sum()), int(self.rows[part].sum())
        values = self.predictions.values[first : first + count]
        return RowPredictions(self.rows[part], replace(self.predictions, values=values)) if count else None


def score_rows(
    model: Reference,
    completions: Completions,
    rows: Tensor,
    *,
    temperature: float,
    parts: Sequence[slice],
    keep: Tensor | None = None,
) -> tuple[Tensor, RowPredictions | None]:
    """Log-probabilities [B, T] of the completions `rows` [B] bool, 0 in the others; predictions for those in `keep`."""
    length, predictions = completions.ids.shape[1], list[Predictions]()
    logprobs = torch.zeros(completions.ids.shape, device=completions.ids.device)
    for part in parts:
        chosen = part.start + rows[part].nonzero()[:, 0]
        if len(chosen):
            options = {} if keep is None or not isinstance(model, LocalReference) else {"keep": keep[chosen]}
            scores = model.score(select(completions, chosen), temperature=temperature, **options)
            logprobs[chosen] = pad_tokens(scores.logprobs, length).to(logprobs.dtype)
            predictions += [] if scores.predictions is None else [scores.predictions.padded(length)]
    if keep is None or not predictions:
        return logprobs, None
    values = torch.cat([part.values for part in predictions])
    return logprobs, RowPredictions(keep, replace(predictions[-1], values=values))


class TeacherScores(NamedTuple):
    """How the teachers of a rollout scored its B completions of T tokens."""

    logprobs: Tensor  # [B, T] log-probabilities of the tokens, each under its own teacher
    parts: Sequence[RowPredictions]  # one for each teacher
    rows: Mapping[str, Tensor]  # key of each teacher -> [B] bool, its completions


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """All teachers of a run: one, or one for each value of the data's column."""

    config: TeacherConfig
    models: Mapping[str, Reference]  # key -> who scores; "" if there is one
    tokenizer: PreTrainedTokenizerBase
    prompts: Mapping[str, str]  # a prompt -> the teacher's prompt; empty: the policy's own

    def key(self, example: Example) -> str:
        return str(example.fields.get(self.config.teacher_key)) if self.config.teacher_key else ""

    def prompt(self, example: Example) -> str | None:
        """The teacher's prompt for a prompt; None: a held-out row without one."""
        return self.prompts.get(example.prompt) if self.config.teacher_prompt else example.prompt

    def completions(self, examples: Sequence[Example], completions: Completions) -> Completions:
        """The same completions behind the prompts that the teacher sees."""
        if not self.prompts:
            return completions
        texts = [self.prompts[example.prompt] for example in examples]
        ids, mask = encode_prompts(texts, self.tokenizer, completions.ids.device)
        return replace(completions, prompt_ids=ids, prompt_mask=mask)

    def score(
        self, examples: Sequence[Example], completions: Completions, *, temperature: float, parts: Sequence[slice]
    ) -> TeacherScores:
        """Score a rollout in parts: every row by its own teacher, whose numbers return to that row."""
        completions, whole = self.completions(examples, completions), prefix_kl(self.config) is not None
        logprobs = torch.zeros(completions.ids.shape, device=completions.ids.device)
        predictions, rows_of = list[RowPredictions](), dict[str, Tensor]()
        for key, model in self.models.items():
            mine = [self.key(example) == key for example in examples]
            rows = rows_of[key] = torch.tensor(mine, device=logprobs.device)
            keep = rows if whole else None
            scores, predicted = score_rows(model, completions, rows, temperature=temperature, parts=parts, keep=keep)
            logprobs[rows] = scores[rows]
            if predicted is not None:
                head = predicted.predictions.head
                if self.config.kind == "live" and head is not None:  # the head of the whole step
                    predicted = RowPredictions(rows, replace(predicted.predictions, head=head.copied()))
                predictions.append(predicted)
        return TeacherScores(logprobs, predictions, rows_of)


def frozen_model(name: str, policy: Any, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, who: Who) -> Any:
    """A separate model with the policy's tokens; padding that only the policy has is cut."""
    model = load_model(name, config.model.dtype)
    check_tokens_of(name, tokenizer, who=who)
    if who == "reference" and len(tokenizer) <= (entries := output_size(model)) < output_size(policy):
        # entries that the tokenizer does not have mean nothing, and without them in the reference the KL is infinite
        text = f"The policy's entries from {entries} on are cut: neither the tokenizer nor the reference has them."
        warnings.warn(text, KLWarning, stacklevel=2)
        policy.resize_token_embeddings(entries)
    check_same_vocabulary(model, policy, who=who, larger=True)
    return model


def frozen_start(config: TrainConfig, start: Any, tokenizer: PreTrainedTokenizerBase) -> nn.Module | None:
    """The model of a frozen reference, from the policy without an adapter, whose padding may be cut."""
    if reference_kind(config) != "frozen":
        return None
    name = config.model.ref_model
    return frozen_model(name, start, tokenizer, config, "reference") if name else copy.deepcopy(start)


def load_reference(
    config: TrainConfig, scorer: Scorer, own: nn.Module | None, task: Task, tokenizer: PreTrainedTokenizerBase
) -> Reference | None:
    """The reference of a run, on `own` if it is frozen; None if nothing needs one here."""
    kind, traits = reference_kind(config), scorer.traits
    if kind in ("none", "sampler"):
        return None
    if kind == "remote":
        return connect(config, task, tokenizer)
    if kind == "adapter_off":
        return LocalReference(scorer.model, traits=traits, adapter_off=True)
    if own is None:  # a copy of the policy as it was before the first step
        resumes = config.run.resume
        start = load_policy(config, load_model(config.model.model, config.model.dtype)) if resumes else scorer.model
        own = copy.deepcopy(start)
    elif config.model.ref_model:
        check_rooms(config, task, tokenizer, {"": max_length(own.config)}, {}, who="reference")
    dtype = config.kl.reference_dtype
    own = own.to(device=device_of(config), dtype=None if dtype is None else getattr(torch, dtype))
    if kind == "frozen":
        return LocalReference(own.requires_grad_(False).eval(), traits=None if config.model.ref_model else traits)
    reference = moving(kind, "reference", own, traits, config)
    reference.original = LocalReference(copy.deepcopy(reference.model), traits=traits)
    return reference


def moving(kind: str, who: Who, model: nn.Module, traits: Traits, config: TrainConfig) -> MovingReference:
    """An anchor that follows the policy: a copy of the policy."""
    fields = config.flat()
    decay = fields[f"{who}_decay"] if kind == "ema" else None
    return MovingReference(model, decay=decay, reset_steps=fields[f"{who}_reset_steps"], traits=traits)


def load_teachers(
    config: TrainConfig, scorer: Scorer, task: Task, tokenizer: PreTrainedTokenizerBase
) -> Teachers | None:
    """The teachers of a run, ready to score; None if it has none."""
    teacher, policy, models = config.teacher, scorer.model, dict[str, Reference]()
    if not teacher.there:
        return None
    prompts = teacher_prompts(config, task, tokenizer)
    check_keys(config, task, teacher.models)
    if teacher.kind == "remote":
        shown = [replace(e, prompt=prompts.get(e.prompt, e.prompt)) for e in task.train]
        models[""] = connect(config, replace(task, train=shown), tokenizer, who="teacher")
    elif teacher.kind == "frozen":
        for key, name in teacher.models.items():
            model = frozen_model(name, policy, tokenizer, config, "teacher")
            models[key] = LocalReference(model.to(device_of(config)))
    elif teacher.kind in ("ema", "periodic"):
        models[""] = moving(teacher.kind, "teacher", copy.deepcopy(policy), scorer.traits, config)
    else:
        models[""] = LocalReference(policy, traits=scorer.traits, adapter_off=teacher.kind == "adapter_off")
    rooms = {key: max_length(x.model.config) for key, x in models.items() if isinstance(x, LocalReference)}
    check_rooms(config, task, tokenizer, rooms, prompts, who="teacher")
    return Teachers(config=teacher, models=models, tokenizer=tokenizer, prompts=prompts)


def connect(
    config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase, *, who: Who = "reference"
) -> VLLMReference:
    """The reference at `reference_url`, or the teacher at `teacher_url`, found to fit the run; `task`: what it sees."""
    fields, length = config.flat(), config.rollout.max_completion_length
    return vllm_reference.connect(
        str(fields[f"{who}_url"] or ""),
        fields[f"{who}_name"],
        top_k=config.teacher.head_size if who == "teacher" else None,
        temperature=config.rollout.temperature,
        longest=(check_prompts(task.train, tokenizer, None, length), length),
        prompts=[example.prompt for example in task.train[: vllm_reference.PROBES]],
        tokenizer=tokenizer,
        who=who,
    )


def check_tokens_of(name: str, ours: PreTrainedTokenizerBase, *, who: Who = "teacher") -> None:
    """Refuse an anchor whose tokenizer gives other ids to the policy's tokens; see `check_tokens`."""
    theirs = None
    with suppress(ModelError):
        theirs = load_tokenizer(name)
    check_tokens(theirs, ours, name=name, who=who)


def teacher_prompts(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A prompt -> the teacher's prompt; empty if both see one prompt. Held-out prompts may lack it."""
    column, prompts = config.teacher.teacher_prompt, dict[str, str]()
    if not column:
        return prompts
    for row, example in enumerate(task.train, start=1):
        if column not in example.fields:
            raise no_prompt(column, example.fields)
        text = prompt_text(example.fields[column], config.task, tokenizer, where=f"{column} of prompt {row}")
        if prompts.setdefault(example.prompt, text) != text:
            what, fix = "one prompt has two prompts for the teacher", "make the prompts differ, or keep one of the rows"
            why = "a completion could not show which one the teacher answers"
            raise DataError(what, got=repr(example.prompt[:200]), why=why, fix=fix)
    for example in task.held_out:
        if value := example.fields.get(column):
            text = prompt_text(value, config.task, tokenizer, where=f"{column} of a held-out prompt")
            prompts.setdefault(example.prompt, text)
    return prompts


def check_rooms(
    config: TrainConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    rooms: Mapping[str, int | None],
    prompts: Mapping[str, str],
    *,
    who: Who,
) -> None:
    """Refuse prompts that leave a completion no room in an anchor's positions, `rooms` by the teacher's key."""
    column, length = config.teacher.teacher_key if who == "teacher" else None, config.rollout.max_completion_length
    for key, room in rooms.items():
        own = [e for e in task.train if not column or str(e.fields.get(column)) == key]
        shown = [replace(e, prompt=prompts.get(e.prompt, e.prompt)) for e in own]
        check_prompts(shown, tokenizer, room, length, f"the {who}'s ")


def check_keys(config: TrainConfig, task: Task, models: Mapping[str, str]) -> None:
    """Refuse prompts whose key names no teacher."""
    column = config.teacher.teacher_key
    for example in task.train if column else ():
        if (key := str(example.fields.get(column))) not in models:
            got = f"{column}={key!r}, teacher_models={', '.join(models)}"
            why, fix = "nothing would score its completions", f"add {key}=MODEL to teacher_models, or repair the row"
            raise DataError(f"a prompt names a teacher that does not exist: {key!r}", got=got, why=why, fix=fix)
