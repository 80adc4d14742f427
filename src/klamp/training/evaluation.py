"""What is asked of a run's weights: every skill on held-out prompts, whose answers are decoded greedily or read; and
whether the completions that the run kept are those of the weights that wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from klamp.errors import DataError
from klamp.hosts.common.sampler_weights import SyncReport, check_sync
from klamp.scoring.completions import Completions
from klamp.scoring.scorer import score
from klamp.tasks.base import Example
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.folders import COMPLETIONS, checkpoint_folders, lines_of, number_of, policy_in
from klamp.training.models import load_model, load_tokenizer, with_adapter
from klamp.training.references import LocalReference
from klamp.training.rollouts import completed
from klamp.training.sampling import encode_prompts

BATCH = 256
"""Prompts that are answered at a time."""
READ_AT_ONCE = 16
"""Answers whose logits are held at a time."""
ROWS = 8
"""Completions of a step that are scored again."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    scores: dict[str, float]
    """Skill -> mean score."""
    answers: list[dict[str, object]]
    """The first answers of each skill, as lines of answers.jsonl."""


def evaluate(context: Context) -> Evaluation:
    """Decode every held-out prompt greedily and score it; a skill of `Task.read` is read instead."""

    def logprobs(given: Completions) -> Tensor:
        return score(context.policy, given, temperature=1.0).logprobs

    scores: dict[str, float] = {}
    answers: list[dict[str, object]] = []
    for skill, examples in context.task.evaluation.items():
        if skill in context.task.read:
            rated = probabilities(examples, context.tokenizer, context.device, logprobs)
        else:
            texts = [text for part in _parts(examples, BATCH) for text in _greedy(context, part)]
            rated = [context.task.score(e, t) for e, t in zip(examples, texts, strict=True)]
            shown = slice(context.config.run.log_answers)
            answers += _rows(examples[shown], texts[shown], rated[shown])
        scores[skill] = sum(rated) / max(1, len(examples))
    return Evaluation(scores=scores, answers=answers)


def _greedy(context: Context, examples: Sequence[Example]) -> list[str]:
    return completed(context, [e.prompt for e in examples], uniforms=None).texts(context.tokenizer)


def _rows(examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float]) -> list[dict[str, object]]:
    return [
        {"skill": e.skill, "question": e.question, "completion": text, "score": rating}
        for e, text, rating in zip(examples, texts, scores, strict=True)
    ]


def teacher_answers(context: Context) -> list[dict[str, object]]:
    """What the teachers that can write here answer greedily, each behind the prompt that it sees; as `answers`.

    Args:
        context: the run; held-out prompts without a teacher's prompt or key have no answer of a teacher.
    """
    task, teachers, shown = context.task, context.teachers, context.config.run.log_answers
    if teachers is None:
        return []
    written = [rows for skill, rows in task.evaluation.items() if skill not in task.read]
    every = [each for rows in written for each in rows[:shown]]
    answers: list[dict[str, object]] = []
    for key, model in teachers.models.items():
        examples = [each for each in every if teachers.key(each) == key and teachers.prompt(each) is not None]
        if examples and isinstance(model, LocalReference):
            prompts = [str(teachers.prompt(each)) for each in examples]
            texts = completed(context, prompts, uniforms=None, reference=model).texts(context.tokenizer)
            rated = [task.score(each, text) for each, text in zip(examples, texts, strict=True)]
            answers += [{**row, "who": "teacher"} for row in _rows(examples, texts, rated)]
    return answers


def _parts(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    return (examples[i : i + size] for i in range(0, len(examples), size))


def probabilities(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    logprobs_of: Callable[[Completions], Tensor],
) -> list[float]:
    """The probability that a model gives each token of an example's answer, at temperature 1.

    Equation: exp(mean over t of log p(answer_t | prompt, answer_<t)), one over the answer's perplexity; in (0, 1].

    Args:
        examples: with the answers.
        tokenizer: the model's.
        device: where the tokens go.
        logprobs_of: gives [B, T] log-probabilities of the completions' tokens under the model, in nats.
    """
    rated: list[float] = []
    for part in _parts(examples, READ_AT_ONCE):
        given = answers_as_completions(part, tokenizer, device)
        with torch.no_grad():
            logprobs = logprobs_of(given).double()
        means = torch.where(given.mask, logprobs, 0.0).sum(-1) / given.mask.sum(-1)
        rated += means.exp().tolist()
    return rated


def answers_as_completions(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Completions:
    """The answers as if they had been sampled; no end token is added, for an answer may go on after its sentence."""
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in examples], tokenizer, device)
    given: Any = tokenizer(
        [e.answer for e in examples], return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    ids, mask = given["input_ids"].to(device), given["attention_mask"].bool().to(device)
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros_like(ids, dtype=torch.float32),
        ended=torch.ones(len(ids), dtype=torch.bool, device=device),
    )


def check_completions(config: TrainConfig, folder: Path) -> Iterator[tuple[int, SyncReport]]:
    """What sampler and trainer reported, at each step whose weights are at hand: (step, report), the first step first.

    The first step's weights are those of the model that the run started from; those of step N + 1 are in the checkpoint
    of step N.

    Args:
        config: of the run.
        folder: its folder.

    Raises:
        DataError: the run kept no completions of such a step, or none with a sampler's log-probabilities.
        ModelError: weights cannot be loaded.
    """
    kept = _by_step(folder / COMPLETIONS)
    counted = config.optim.num_iterations if config.run.backend == "trl" else 1  # TRL counts updates
    weights = {1: None, **{number_of(saved) // counted + 1: saved for saved in checkpoint_folders(folder)}}
    steps = sorted(weights.keys() & kept.keys())
    if not steps:
        raise DataError(
            "no completions can be scored again",
            got=f"completions of steps {sorted(kept) or 'none'}, weights of steps {sorted(weights)}",
            why="a step's weights are those before it: the model of the start, or the checkpoint of the step before",
            fix="set log_completions_every=1; where transformers generates for TRL, a sampler tells nothing",
        )
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    start = load_model(config.model.model, config.model.dtype)
    for step in steps:
        saved, rows = weights[step], kept[step]
        moved = saved is not None and not config.model.lora_r  # with an adapter, the start is the policy without it
        yield (
            step,
            check_sync(
                start if saved is None else _policy(config, saved),
                [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows],  # pyright: ignore
                [tokenizer.convert_tokens_to_ids(row["tokens"]) for row in rows],  # pyright: ignore
                [row["sampler_logprobs"] for row in rows],
                trainer_logprobs=[row["policy_logprobs"] for row in rows],
                temperature=config.rollout.temperature,
                top_k=config.rollout.top_k,
                top_p=config.rollout.top_p,
                start=start if moved else None,
            ),
        )


def _policy(config: TrainConfig, checkpoint: Path) -> Any:
    """The policy of a checkpoint."""
    model, saved = config.model, policy_in(checkpoint)
    if model.lora_r:
        return with_adapter(load_model(model.model, model.dtype), model, saved).eval()
    return load_model(str(saved), model.dtype)


def _by_step(file: Path) -> dict[int, list[dict[str, Any]]]:
    """The first completions of each step that have the log-probabilities of a sampler."""
    kept: dict[int, list[dict[str, Any]]] = {}
    for row in lines_of(file):
        told = [value for value in row.get("sampler_logprobs") or () if value is not None and math.isfinite(value)]
        rows = kept.setdefault(int(row["step"]), []) if told else []
        if len(rows) < ROWS:
            rows.append(row)
    return kept
