"""Audits losses of installed trainers, by their own code on a drawn batch, and functions; `klamp.check` judges each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from klamp.audit.function import load_function, takes
from klamp.audit.micro_batch import check
from klamp.audit.verdict import CheckFinding, Verdict, finding
from klamp.core.types import Direction
from klamp.errors import KLWarning
from klamp.verify.sequences import Scores, Sequences, distance, gradient_of

FAR = 0.25  # distance from the promised gradient from which on a loss does not follow it
PADDING = 8  # places that are added to each row, to see whether padding counts
MOVED = 0.3  # how far the policy moved since the rollout: the standard deviation of a logit


@dataclass(frozen=True, kw_only=True)
class AuditedLoss:
    """A loss of a trainer, or a KL; what `compute` takes and returns:

    "logprobs": (policy, ref, old, mask), [B, T] each -> the KL part of a loss; with advantages, [B], as the fifth, the
    whole loss. "function": (policy, ref) -> [B, T], or a whole loss. "reward": a "function" that is subtracted from the
    reward. "sequences": a batch -> a loss of distillation.
    """

    name: str  # of the function or class, and the options that make it compute this loss
    compute: Callable[..., Tensor]  # the trainer's own code, at coefficient 1
    takes: Literal["logprobs", "function", "reward", "sequences"] = "logprobs"
    means: Direction = "reverse"  # the divergence that its name promises
    temperature: float = 1.0  # what it divides the logits of student and teacher by
    scaled: bool = True  # False: its coefficient is not known to be 1, so that it may be any distance away

    @property
    def whole(self) -> bool:
        """Whether the policy loss is in it."""
        return self.takes == "logprobs" and takes(self.compute, 5)

    def verdict(self) -> Verdict:
        """What its gradient follows, whether more padding changes it, and whether it is far from what it promises."""
        with warnings.catch_warnings(action="ignore", category=KLWarning):
            if self.takes == "function":
                return check(self.compute, means=self.means)
            batch = Sequences.drawn(moved=0.0 if self.takes == "sequences" else 0.25)
            facts: dict[str, Any] = {"means": self.means, "temperature": self.temperature, "once": False}
            if self.takes == "sequences":
                facts |= {"logits": batch.student, "teacher_logits": batch.teacher}
                facts |= {"mask": pad(batch.mask[:, 1:], (0, 1)), "ids": batch.tokens.roll(-1, 1)}
                verdict = check(self.compute(batch), **facts)
            else:
                verdict = self._check_logprobs(batch, facts)
            verdict, off = verdict.with_findings(self._padding()), self.distances[0] or 0.0
            far = finding("far-from-promise", off=off, means=self.means)
            return verdict.with_findings([far] if off >= FAR and self.scaled and verdict.ok is not False else [])

    def _check_logprobs(self, batch: Sequences, facts: dict[str, Any]) -> Verdict:
        now, ref, old, mask = scores = batch.scores
        loss = self._loss(batch, scores)
        if self.takes == "reward":
            facts |= {"advantages": -self.compute(now.detach(), ref)}
            loss = (-facts["advantages"] * now)[mask].mean()
        elif self.whole:
            facts |= {"advantages": torch.linspace(-1.5, 2, len(now)), "beta": 1.0, "clip": (0.2, 0.2)}
            loss = self.compute(*scores, facts["advantages"])
        return check(loss, policy_logprobs=now, ref_logprobs=ref, old_logprobs=old, mask=mask, **facts)

    def _loss(self, batch: Sequences, scores: Scores) -> Tensor:
        now, ref, old, mask = scores
        if self.takes == "sequences":
            return self.compute(batch)
        if self.takes == "reward":  # a KL of the rollout's policy, a factor of the ratio
            return ((now - old).exp() * self.compute(old, ref))[mask].mean()
        if self.takes == "function":
            return self.compute(now, ref)[mask].mean()
        return self.compute(*scores, now.new_zeros(len(now))) if self.whole else self.compute(*scores)

    def _padding(self) -> Iterator[CheckFinding]:
        batches = [Sequences.drawn(padding=x) for x in (0, PADDING)]
        plain, padded = (gradient_of(self._loss(x, x.scores), x.student)[pad(x.mask[:, 1:], (0, 1))] for x in batches)
        if (padded - plain).norm() > 1e-3 * plain.norm():
            factor = float((padded * plain).sum() / plain.square().sum())
            yield finding("mean-over-padding", factor=factor, padding=PADDING)

    @cached_property
    def distances(self) -> tuple[float | None, float | None]:
        """How far its expected gradient is from the gradient that it promises, as a share of the latter.

        On tokens of the present policy, and of one that has moved since. None: the trainer raises an exception.
        """
        facts: dict[str, Any] = {"whole": self.compute} if self.whole else {"temperature": self.temperature}
        length = 1 if self.takes == "sequences" else 2
        with suppress(Exception):  # which is a finding of its verdict
            near, far = (distance(self._loss, self.means, length, moved=x, **facts) for x in (0.0, MOVED))
            return near, far
        return None, None


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
        loss = replace(loss, compute=lambda batch: function(*batch.aligned[:4]), takes="sequences", scaled=False)
    else:
        loss.verdict()  # a function of another form is refused here
    return Subject(title=path, losses=(loss,))


def audit(subject: Subject) -> dict[str, Verdict]:
    """The verdict on each loss by its name; an exception that the trainer raises is the finding `check-failed`."""
    verdicts = {}
    for loss in subject.losses:
        try:
            verdicts[loss.name] = loss.verdict()
        except Exception as error:  # any error of the trainer is the finding
            cause = error.__cause__ or error
            what = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}".rstrip(": .")
            verdicts[loss.name] = Verdict.of([finding("check-failed", error=what)])
    return verdicts


def of_beta(beta: float) -> Direction:
    """The divergence that the `beta` of GKD and its kin names."""
    return "forward" if beta == 0 else "reverse" if beta == 1 else "js"
