"""Distillation losses on logits: TRL's four trainers, Liger's and torchrl's, each the trainer's own method."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from tests.audit.bench.worlds import Case, World

from klamp.audit import liger, torchrl, trl_distillation
from klamp.audit.distillation import PROMPT, Distillation, Sequences

SERVER, ASYNC = "ServerDistillationTrainer, ", "AsyncDistillationTrainer, "
HEADS: dict[str, tuple[tuple[str, ...], bool, str]] = {
    SERVER + "beta=1.0 (default)": (("reverse",), True, "head-bucket"),
    SERVER + "beta=1.0, loss_add_tail=False": (("none", "reverse"), False, ""),
    SERVER + "beta=0.5": (("js",), True, "head-bucket"),
    SERVER + "beta=0.0, loss_top_k=3": (("forward",), True, "head-bucket"),
    SERVER + "beta=0.0, loss_top_k=3, loss_add_tail=False": (("forward",), False, "head-renormalised"),
    ASYNC + "beta=0.0, teacher_top_k=3": (("forward",), True, "head-bucket"),
    ASYNC + "beta=1.0, teacher_top_k=3": (("reverse",), True, "head-bucket"),
    "DistillationLoss, kl_direction=reverse (default)": (("forward",), False, "kl-forward"),
}
"""Losses of some tokens (torchrl differentiates k3): class, sound, code. All others follow what they mean."""


def cases(batch: Sequences) -> Iterator[tuple[Case, str]]:
    """18 losses of a batch, and a code of any level; a position predicts the token after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hosts = (trl_distillation.distillations(), liger.subject().distillations, torchrl.subject().distillations)
    mask = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)
    given = {"logits": batch.student, "teacher_logits": batch.teacher, "mask": mask, "ids": batch.tokens.roll(-1, 1)}

    def made(w: World, each: Distillation) -> tuple[torch.Tensor, dict[str, object]]:
        return each.loss(batch), w.teacher_passed(means=each.means, temperature=each.temperature, **given)

    for each in (each for host in hosts for each in host):
        kl, ok, code = HEADS.get(each.name, ((each.means,), True, ""))
        yield Case(each.name, lambda w, x=each: made(w, x), kl=kl, ok=ok, beta=None), code


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
