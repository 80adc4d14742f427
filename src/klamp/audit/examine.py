"""Audits functions and the losses of installed trainers: each is judged as `klamp.check` judges a micro-batch.

A function that returns one number per token is a KL: it is tried at any log-ratio. One that returns a scalar may hold a
policy loss too: what the reference changes in its gradient is the KL's part. A loss of a trainer is computed by the
trainer's own code, on a drawn batch with padding and a policy that has moved since the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from klamp.audit.capture import Capture, roundoff
from klamp.audit.conclude import Reading, conclude
from klamp.audit.logits import check_logits
from klamp.audit.verdict import Verdict, finding
from klamp.core.arguments import describe
from klamp.core.types import Direction
from klamp.errors import ConfigError

CONTRACT = "function(policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T]"
DISTILLATION_CONTRACT = "function(student_logits [B, T, V], teacher_logits [B, T, V], tokens [B, T], mask [B, T]) -> []"

PROMPT = 2
"""Tokens of the prompt before each drawn completion."""


class Sequences(NamedTuple):
    """What a trainer has of a batch of prompts and completions.

    Attributes:
        student: logits [B, L, V]; those at a position are of the token after it; carries the gradient.
        teacher: the same of the teacher, [B, L, W].
        tokens: prompt, completion, padding, [B, L].
        mask: True on the tokens of the completion, [B, L].
    """

    student: Tensor
    teacher: Tensor
    tokens: Tensor
    mask: Tensor

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
    """A loss of a trainer, or a KL.

    Attributes:
        name: of the function or class, and the options that make it compute this loss.
        compute: the trainer's own code, at coefficient 1.
        takes: what `compute` takes and returns: "logprobs": (policy, ref, old, mask), each [B, T] -> the KL part of a
            loss; "function": (policy, ref) -> [B, T], or a whole loss; "reward": the same, and the value is taken from
            the reward; "sequences": a batch -> a loss of distillation.
        means: the divergence that its name promises.
        temperature: what it divides the logits of student and teacher by.
    """

    name: str
    compute: Callable[..., Tensor]
    takes: Literal["logprobs", "function", "reward", "sequences"] = "logprobs"
    means: Direction = "reverse"
    temperature: float = 1.0

    def verdict(self) -> Verdict:
        """What its gradient follows."""
        if self.takes == "function":
            return check_function(self.compute, means=self.means)
        if self.takes != "sequences":
            return self._of_logprobs()
        batch = Sequences.drawn()
        mask = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)  # a position predicts the next
        inputs = {"mask": mask, "ids": batch.tokens.roll(-1, 1), "means": self.means, "temperature": self.temperature}
        return check_logits(self.compute(batch), batch.student, batch.teacher, beta=None, **inputs)

    def _of_logprobs(self) -> Verdict:
        g = torch.Generator().manual_seed(0)
        policy = (-0.2 - 3.8 * torch.rand(6, 12, generator=g)).requires_grad_()
        ref, old = ((policy.detach() + x * torch.randn(6, 12, generator=g)).clamp(max=-1e-3) for x in (0.3, 0.25))
        mask = torch.arange(12) < torch.tensor([12, 12, 9, 7, 5, 4])[:, None]
        tensors = {"policy_logprobs": policy, "ref_logprobs": ref, "old_logprobs": old, "mask": mask}
        if self.takes == "reward":
            tensors["advantages"] = -self.compute(policy.detach(), ref)
            loss = (-tensors["advantages"] * policy)[mask].mean()
        else:
            loss = self.compute(policy, ref, old, mask)
        tensors["gradient"] = torch.autograd.grad(loss, policy)[0]
        return conclude(_captured(tensors, means=self.means))


def _captured(tensors: dict[str, Tensor], **facts: Any) -> Capture:
    arrays: dict[str, Any] = {name: x.detach().double().cpu().numpy() for name, x in tensors.items()}
    return Capture(arrays=arrays | {"mask": arrays["mask"] > 0}, facts=facts)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited.

    Attributes:
        title: the name of the package and its version.
        losses: the default first.
        notes: facts read from the installed package, a sentence each.
        cautions: why the result may not hold, such as an untried version.
    """

    title: str
    losses: tuple[AuditedLoss, ...] = ()
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


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


REACH = 3.0
"""The largest log-ratio that is tried, in nats."""


def check_function(
    function: Callable[..., Tensor], *, example: tuple[Tensor, Tensor] | None = None, means: str = "reverse"
) -> Verdict:
    """The verdict on a function of (policy_logprobs, ref_logprobs), [B, T] each, that returns [B, T] or a scalar.

    Args:
        function: the KL, or a whole loss.
        example: log-probabilities that it accepts; None: 8 completions of 8 tokens in float64.
        means: the divergence that is meant.

    Raises:
        ConfigError: the function cannot be called so, or returns no tensor with a gradient.
    """
    policy = torch.linspace(-4, -0.2, 64, dtype=torch.float64).reshape(8, 8) if example is None else example[0].detach()
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(policy.numel(), generator=generator)
    steps = torch.linspace(-REACH, REACH, policy.numel() + 1, dtype=torch.float64)[1:][shuffled].reshape(policy.shape)
    ref = policy - steps.to(policy)
    value, gradient = called(function, policy, ref)
    value_at, at = called(function, policy, policy)
    pull = gradient if value.ndim else gradient - at
    near = called(function, policy, policy - 0.05)[1]  # a token beyond a clamp is not one that the function leaves out
    moved = gradient.abs() + at.abs() + near.abs() > 0
    dtype = str(policy.dtype).removeprefix("torch.")
    summary = f"a function of {policy.numel()} tokens, {dtype}, up to {REACH:g} nats"
    if not moved.any():
        return Verdict.of([finding("kl-detached")], summary=summary, kl="none")
    if not (pull[moved].abs() > 1e-6 * gradient.abs().max()).any():
        what = "the reference changes the loss's value and not its gradient (k1 differentiated, or a detached KL)"
        absent = finding("kl-absent", seen=": the reference changes neither value nor gradient")
        inert = finding("kl-zero", what=what) if bool((value - value_at).abs().max() > 0) else absent
        return Verdict.of([inert], summary=summary, kl="none")
    tensors = {"policy_logprobs": policy, "ref_logprobs": ref, "gradient": pull, "mask": moved}
    if policy.ndim == 1:
        tensors = {name: x[None] for name, x in tensors.items()}
    facts: dict[str, Any] = {"means": means, "beta": 1.0, "eps": roundoff(torch.finfo(policy.dtype).eps)}
    verdict = Reading(_captured(tensors, **facts), []).verdict()
    findings = [x for x in verdict.findings if x.code not in ("beta-scale", "few-tokens")]  # there is no batch
    if value.ndim and bool((value < 0).any()) and bool(value_at.abs().max() < 1e-6):
        findings.append(finding("value-negative"))
    left = {"masks, means, beta and the numbers of a batch": "check a micro-batch"}
    explanation = verdict.found.removeprefix("no policy loss; ")
    return Verdict.of(findings, summary=summary, found=explanation, kl=verdict.kl, not_checked=left)


def called(function: Callable[..., Tensor], policy: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a foreign function, and the gradient of its sum in the policy's log-probabilities.

    Raises:
        ConfigError: it takes other arguments, fails, or returns no tensor.
    """
    leaf, value, cause = policy.detach().clone().requires_grad_(), None, None
    try:
        value = function(leaf, ref.detach())
        got = f"it returned {describe(value)}"
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        got, cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", error
    if not isinstance(value, Tensor) or not value.is_floating_point():
        why = f"it is called as {CONTRACT}, or as {DISTILLATION_CONTRACT}"
        fix = "name a function of that form, or wrap yours: lambda policy, ref: yours(policy, ref, mask)"
        raise ConfigError("an audit cannot call the function", got=got, why=why, fix=fix) from cause
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), torch.zeros_like(policy) if gradient is None else gradient
