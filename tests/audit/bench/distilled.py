"""Distillation losses on logits: TRL's four trainers, Liger's and torchrl's, each the trainer's own method."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import klamp
from klamp.audit import liger, torchrl, trl_distillation
from klamp.audit.distillation import PROMPT, Distillation, Sequences
from klamp.audit.verdict import Verdict


class Expected(NamedTuple):
    """What is right about a loss: the class, whether it is sound, and one code of any level."""

    kl: tuple[str, ...]
    ok: bool = True
    code: str = ""


HEADS = {
    "ServerDistillationTrainer, beta=1.0 (default)": Expected(("reverse",), code="head-bucket"),
    "ServerDistillationTrainer, beta=1.0, loss_add_tail=False": Expected(("none", "reverse"), ok=False),
    "ServerDistillationTrainer, beta=0.5": Expected(("js",), code="head-bucket"),
    "ServerDistillationTrainer, beta=0.0, loss_top_k=3": Expected(("forward",), code="head-bucket"),
    "ServerDistillationTrainer, beta=0.0, loss_top_k=3, loss_add_tail=False": Expected(
        ("forward",), ok=False, code="head-renormalised"
    ),
    "AsyncDistillationTrainer, beta=0.0, teacher_top_k=3": Expected(("forward",), code="head-bucket"),
    "AsyncDistillationTrainer, beta=1.0, teacher_top_k=3": Expected(("reverse",), code="head-bucket"),
    "DistillationLoss, kl_direction=reverse (default)": Expected(("forward",), ok=False, code="kl-forward"),
}
"""Losses of some tokens (torchrl differentiates k3); all others look at the vocabulary, and follow what they mean."""


def losses() -> Iterator[tuple[Distillation, Expected]]:
    """18 losses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hosts = (trl_distillation.distillations(), liger.subject().distillations, torchrl.subject().distillations)
    for host in hosts:
        for each in host:
            yield each, HEADS.get(each.name, Expected((each.means,)))


def make_sequences(seed: int = 0, *, rows: int = 4, length: int = 10, vocabulary: int = 16) -> Sequences:
    """Prompts, completions that the student sampled, and padding; the student's logits are a leaf."""
    g = torch.Generator().manual_seed(seed)
    student = 1.5 * torch.randn(rows, PROMPT + length, vocabulary, generator=g)
    teacher = student + 0.7 * torch.randn(student.shape, generator=g)
    drawn = torch.multinomial(student.softmax(-1).flatten(0, 1), 1, generator=g).reshape(rows, -1)
    tokens = torch.cat([torch.randint(vocabulary, (rows, 1), generator=g), drawn[:, :-1]], 1)
    lengths = PROMPT + torch.randint(length // 2, length + 1, (rows,), generator=g)
    lengths[0] = PROMPT + length
    place = torch.arange(PROMPT + length)
    mask = (place >= PROMPT)[None] & (place[None] < lengths[:, None])
    return Sequences(student.requires_grad_(), teacher, tokens, mask)


def verdict_of(loss: Distillation, batch: Sequences, **more: Any) -> Verdict:
    """`klamp.check` on a loss of a batch; a position predicts the token after it."""
    last = torch.zeros_like(batch.mask[:, :1])
    arguments: dict[str, Any] = {
        "logits": batch.student,
        "teacher_logits": batch.teacher,
        "mask": torch.cat([batch.mask[:, 1:], last], 1),
        "ids": batch.tokens.roll(-1, 1),
        "means": loss.means,
        "temperature": loss.temperature,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return klamp.check(loss.loss(batch), once=False, **arguments, **more)


def worth_of(expected: Expected, verdict: Verdict) -> str:
    """Whether a verdict is right."""
    if expected.ok and verdict.ok is False:
        return "accused"
    if verdict.ok is None:
        return "cannot tell"
    named = verdict.kl in expected.kl and (not expected.code or expected.code in verdict.codes())
    return "right" if verdict.ok is expected.ok and named else "wrong name"
