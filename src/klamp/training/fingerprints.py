"""Fingerprints of what a run learns from: its task, its chat template, and the models that score its completions.

A text has its SHA-256. A model has the log-probabilities that it gives to a few fixed tokens, so that one behind a
server has a fingerprint too. A resume with other fingerprints is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from klamp.errors import ConfigError
from klamp.scoring.completions import Completions
from klamp.tasks.base import Task
from klamp.training.context import Context
from klamp.training.references import MovingReference, Reference
from klamp.training.resumed import new_run
from klamp.training.sampling import encode_prompts

PROBES, PROBE_TOKENS = 4, 8
"""Prompts whose first tokens are scored, and how many."""
SAME = 0.05
"""Nats by which the log-probabilities of one model may differ: other kernels, other batches."""
THAT_STAY = ("frozen", "remote", "adapter_off")
"""Kinds of a teacher whose weights never change; those of the others are in the checkpoint."""


def fingerprints(context: Context) -> dict[str, Any]:
    """Name -> SHA-256, or log-probabilities in nats, of a run that is loaded."""
    template = getattr(context.tokenizer, "chat_template", None)
    found: dict[str, Any] = {"chat template": _sha256(template), "task": _task(context.task)}
    start = context.original or context.reference  # a moving reference has moved
    if start is not None and not isinstance(start, MovingReference):
        found["reference"] = _scores(context, start)
    teachers = context.teachers
    if teachers is not None and context.config.teacher.kind in THAT_STAY:
        found |= {f"teacher {key}".strip(): _scores(context, model) for key, model in teachers.models.items()}
    return found


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], *, checkpoint: Path) -> None:
    """Refuse to go on with another task, template, reference or teacher than a run was started with.

    Args:
        saved: the fingerprints in the checkpoint.
        now: those of what is loaded; what only one of the two has is not compared.
        checkpoint: its folder.

    Raises:
        ConfigError: names the first that differs.
    """
    for name in saved.keys() & now.keys():
        if difference := _difference(saved[name], now[name]):
            raise ConfigError(
                f"the {name} is another one than it was",
                got=difference,
                why="the run would go on towards another policy, and its curve would not show it",
                fix=f"use the {name} that the run was started with, or {new_run(checkpoint)}",
            )


def _difference(saved: Any, now: Any) -> str:
    """How two fingerprints differ; empty: they do not."""
    if isinstance(saved, str) or isinstance(now, str):
        return "" if saved == now else f"SHA-256 {saved}, now {now}"
    far = max((abs(x - y) for x, y in zip(saved, now, strict=False)), default=0.0)
    if len(saved) == len(now) and far <= SAME:
        return ""
    return f"log-probabilities of the same tokens differ by up to {far:.3g} nats"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _task(task: Task) -> str:
    """The prompts as the policy sees them and their answers, of training and evaluation."""
    rows = {"": task.train, **task.evaluation}
    return _sha256({skill: [(each.prompt, each.answer) for each in examples] for skill, examples in rows.items()})


def _scores(context: Context, model: Reference) -> list[float]:
    """The log-probabilities of the first tokens of a few prompts, each behind its own prompt."""
    texts = [each.prompt for each in context.task.train[:PROBES]]
    device = context.device
    prompt_ids, prompt_mask = encode_prompts(texts, context.tokenizer, device)
    rows: list[list[int]] = [
        context.tokenizer(text, add_special_tokens=False)["input_ids"][:PROBE_TOKENS] for text in texts
    ]  # pyright: ignore
    ids = pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor([[len(row)] for row in rows], device=device)
    probes = Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(ids.shape, device=device),
        ended=torch.ones(len(ids), dtype=torch.bool, device=device),
    )
    scores = model.score(probes, temperature=context.config.rollout.temperature)
    return [round(x, 4) for x in scores.logprobs[mask].tolist()]
