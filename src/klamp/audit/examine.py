"""Audits losses of installed trainers, by their own code on a drawn batch, and functions; `klamp.check` judges each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from klamp.audit.function import load_function, takes
from klamp.audit.micro_batch import check
from klamp.audit.verdict import Verdict, finding
from klamp.core.types import Direction
from klamp.errors import KLWarning

PROMPT = 2  # tokens before each drawn completion


class Sequences(NamedTuple):
    """What a trainer has of a batch of prompts and completions."""

    student: Tensor  # logits [B, L, V]; those at a position are of the token after it; has the gradient
    teacher: Tensor  # the teacher's logits, [B, L, W]
    tokens: Tensor  # prompt, completion, padding, [B, L]
    mask: Tensor  # True on the tokens of the completion, [B, L]

    @property
    def aligned(self) -> Sequences:
        """The same with the logits of each token at its own position, for losses whose caller shifts: [B, L - 1]."""
        return Sequences(self.student[:, :-1], self.teacher[:, :-1], self.tokens[:, 1:], self.mask[:, 1:])

    @classmethod
    def drawn(cls) -> Sequences:
        """Four completions of at most ten tokens that the student sampled, in float32."""
        g = torch.Generator().manual_seed(0)
        student = 1.5 * torch.randn(4, PROMPT + 10, 20, generator=g)
        teacher = student + 0.7 * torch.randn(student.shape, generator=g)
        ids = torch.multinomial(student.softmax(-1).flatten(0, 1), 1, generator=g).view(4, -1)
        places = torch.arange(PROMPT + 10)
        mask = (places >= PROMPT) & (places < PROMPT + torch.tensor([10, 10, 7, 4])[:, None])
        return cls(student.requires_grad_(), teacher, ids.roll(1, 1), mask)


@dataclass(frozen=True, kw_only=True)
class AuditedLoss:
    """A loss of a trainer, or a KL; what `compute` takes and returns:

    "logprobs": (policy, ref, old, mask), [B, T] each -> the KL part of a loss. "function": (policy, ref) -> [B, T], or
    a whole loss. "reward": the same, to be subtracted from the reward. "sequences": a batch -> a loss of distillation.
    """

    name: str  # of the function or class, and the options that make it compute this loss
    compute: Callable[..., Tensor]  # the trainer's own code, at coefficient 1
    takes: Literal["logprobs", "function", "reward", "sequences"] = "logprobs"
    means: Direction = "reverse"  # the divergence that its name promises
    temperature: float = 1.0  # what it divides the logits of student and teacher by

    def verdict(self) -> Verdict:
        """What its gradient follows."""
        with warnings.catch_warnings(action="ignore", category=KLWarning):
            if self.takes == "function":
                return check(self.compute, means=self.means)
            loss, inputs = self._on_sequences() if self.takes == "sequences" else self._on_logprobs()
            return check(loss, **inputs, means=self.means, temperature=self.temperature, once=False)

    def _on_sequences(self) -> tuple[Tensor, dict[str, Any]]:
        batch = Sequences.drawn()
        mask = pad(batch.mask[:, 1:], (0, 1))  # a position predicts the next
        logits = {"logits": batch.student, "teacher_logits": batch.teacher}
        return self.compute(batch), {"mask": mask, "ids": batch.tokens.roll(-1, 1), **logits}

    def _on_logprobs(self) -> tuple[Tensor, dict[str, Any]]:
        g = torch.Generator().manual_seed(0)
        policy = (-0.2 - 3.8 * torch.rand(6, 12, generator=g)).requires_grad_()
        ref, old = ((policy.detach() + x * torch.randn(6, 12, generator=g)).clamp(max=-1e-3) for x in (0.3, 0.25))
        mask = torch.arange(12) < torch.tensor([12, 12, 9, 7, 5, 4])[:, None]
        inputs = {"policy_logprobs": policy, "ref_logprobs": ref, "old_logprobs": old, "mask": mask}
        if self.takes != "reward":
            return self.compute(policy, ref, old, mask), inputs
        advantages = -self.compute(policy.detach(), ref)
        return (-advantages * policy)[mask].mean(), {**inputs, "advantages": advantages}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited."""

    title: str  # the name of the package and its version
    losses: tuple[AuditedLoss, ...] = ()  # the default first
    notes: tuple[str, ...] = ()  # facts read from the installed package, a sentence each
    cautions: tuple[str, ...] = ()  # why the result may not hold, such as an untried version


def function_subject(path: str, *, means: Direction = "reverse") -> Subject:
    """Prepare a function for an audit: a KL or a whole loss, or, with four arguments, a loss of distillation."""
    function = load_function(path)
    loss = AuditedLoss(name=path, compute=function, takes="function", means=means)
    if takes(function, 4) and not takes(function, 2):
        loss = replace(loss, compute=lambda batch: function(*batch.aligned), takes="sequences")
    else:
        loss.verdict()  # a function of another form is refused here
    return Subject(title=path, losses=(loss,))


def audit(subject: Subject) -> dict[str, Verdict]:
    """The verdict on each loss by its name; an exception that the trainer raises is the finding `check-failed`."""
    verdicts = {}
    for loss in subject.losses:
        try:
            verdicts[loss.name] = loss.verdict()
        except Exception as error:  # whatever the trainer raises is the finding
            cause = error.__cause__ or error
            what = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}".rstrip(": .")
            verdicts[loss.name] = Verdict.of([finding("check-failed", error=what)])
    return verdicts


def of_beta(beta: float) -> Direction:
    """The divergence that the `beta` of GKD and its kin names."""
    return "forward" if beta == 0 else "reverse" if beta == 1 else "js"
