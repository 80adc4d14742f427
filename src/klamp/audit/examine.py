"""Audits functions and the losses of installed trainers: each is judged as `klamp.check` judges a micro-batch.

A function that returns one number per token is a KL: it is tried at any log-ratio. One that returns a scalar may hold a
policy loss too: what the reference changes in its gradient is the KL's part. A loss of a trainer is computed by the
trainer's own code, on a drawn batch with padding and a policy that has moved since the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from klamp.audit.capture import Capture
from klamp.audit.conclude import conclude, judge_kinds
from klamp.audit.fit import Explanation, explain
from klamp.audit.forms import Array, Tokens, roundoff
from klamp.audit.logits import check_logits
from klamp.audit.verdict import Finding, Verdict, finding
from klamp.core.arguments import describe
from klamp.core.types import Direction
from klamp.errors import ConfigError

HostLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(policy_logprobs, ref_logprobs, old_logprobs, mask), each [B, T] -> the KL part of a loss, coefficient 1."""
KLFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(policy_logprobs, ref_logprobs), each [B, T] -> [B, T], or a whole loss."""
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
class Distillation:
    """A loss of distillation: the mean over the trained tokens, or over the completions, of a batch.

    Attributes:
        name: of the function or class, and the options that make it compute this loss.
        loss: the trainer's own loss of a batch, coefficient 1.
        means: the divergence between student (policy) and teacher that its name promises.
        temperature: what it divides the logits of both by.
    """

    name: str
    loss: Callable[[Sequences], Tensor]
    means: Direction
    temperature: float = 1.0

    def verdict(self) -> Verdict:
        """What its gradient in the student's logits follows."""
        batch = Sequences.drawn()
        mask = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)  # a position predicts the next
        known = {"mask": mask, "ids": batch.tokens.roll(-1, 1), "means": self.means, "temperature": self.temperature}
        return check_logits(self.loss(batch), batch.student, batch.teacher, beta=None, **known)


@dataclass(frozen=True, kw_only=True)
class Term:
    """A KL of a trainer: in its loss, or in the reward.

    Attributes:
        name: of the function or class, and the option that makes it compute this term.
        loss: the KL part of a batch's loss; None: there is a function.
        function: the KL of each token.
        in_reward: whether the function's value is taken from the reward.
        means: the divergence that is meant.
    """

    name: str
    loss: HostLoss | None = None
    function: KLFunction | None = None
    in_reward: bool = False
    means: Direction = "reverse"

    def verdict(self) -> Verdict:
        """What its gradient in the policy's log-probabilities follows."""
        if self.function is not None and not self.in_reward:
            return check_function(self.function, means=self.means)
        g = torch.Generator().manual_seed(0)
        policy = (-0.2 - 3.8 * torch.rand(6, 12, generator=g)).requires_grad_()
        ref, old = ((policy.detach() + x * torch.randn(6, 12, generator=g)).clamp(max=-1e-3) for x in (0.3, 0.25))
        mask = torch.arange(12) < torch.tensor([12, 12, 9, 7, 5, 4])[:, None]
        known = {"policy_logprobs": policy, "ref_logprobs": ref, "old_logprobs": old}
        if self.loss is not None:
            loss = self.loss(policy, ref, old, mask)
        else:
            assert self.function is not None
            known["advantages"] = -self.function(policy.detach(), ref)
            loss = (-known["advantages"] * policy)[mask].mean()
        known["gradient"] = torch.autograd.grad(loss, policy)[0]
        arrays = {name: x.detach().double().numpy() for name, x in known.items()} | {"mask": mask.numpy()}
        return conclude(Capture(arrays=arrays, facts={"means": self.means}))


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
    losses: tuple[Term | Distillation, ...] = ()
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def audit(subject: Subject) -> dict[str, Verdict]:
    """The verdict on each loss by its name; an exception that the trainer raises is the finding `check-failed`."""
    return {each.name: _audited(each) for each in subject.losses}


def _audited(each: Term | Distillation) -> Verdict:
    try:
        return each.verdict()
    except Exception as error:  # whatever the trainer raises is the finding
        cause = error.__cause__ or error
        what = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}".rstrip(": .")
        return Verdict.of([finding("check-failed", error=what)])


def marked(option: str, value: object, default: object) -> str:
    """An option with its value, marked where that is the default: `loss_type=dapo (default)`."""
    return f"{option}={value}" + (" (default)" if value == default else "")


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
    delta = steps.to(policy)
    value, gradient = called(function, policy, policy - delta)
    value_at, at = called(function, policy, policy)
    per_token = value.ndim > 0
    pull = gradient if per_token else gradient - at
    near = called(function, policy, policy - 0.05)[1]  # a token beyond a clamp is not one that the function leaves out
    moved = np.abs(gradient) + np.abs(at) + np.abs(near) > 0
    reacts = bool(np.any(np.abs(pull[moved]) > 1e-6 * np.abs(gradient).max(initial=0))) if moved.any() else False
    summary = f"a function of {policy.numel()} tokens, {str(policy.dtype).removeprefix('torch.')}, up to {REACH:g} nats"
    if not reacts:
        return Verdict.of([_inert(value, value_at, bool(moved.any()))], summary=summary, kl="none")
    tokens = _tokens(policy, delta, pull, moved)
    explained = explain(tokens)
    kl, findings = _named(explained, means, tokens)
    found = explained.fits[0].kl.name if kl != "unknown" and explained.fits and explained.fits[0].kl else ""
    if per_token and bool((value < 0).any()) and bool(value_at.abs().max() < 1e-6):
        findings.append(finding("value-negative"))
    return Verdict.of(
        findings,
        summary=summary,
        found=f"KL, gradient {found}" if found else "",
        kl=kl,
        not_checked={"masks, means, beta and the numbers of a batch": "check a micro-batch"},
    )


FORMS = "it is called as function(policy_logprobs, ref_logprobs), with the shape of the example"


def called(
    function: Callable[..., Tensor], policy: Tensor, ref: Tensor, *, name: str = "the function", forms: str = FORMS
) -> tuple[Tensor, Array]:
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
        fix = "name a function of that form, or wrap yours: lambda policy, ref: yours(policy, ref, mask)"
        raise ConfigError(f"{name} cannot be called as an audit calls it", got=got, why=forms, fix=fix) from cause
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    array = np.zeros(policy.shape) if gradient is None else gradient.double().cpu().numpy()
    return value.detach(), array


def _inert(value: Tensor, at: Tensor, trained: bool) -> Finding:
    if not trained:
        return finding("kl-detached")
    if bool((value - at).abs().max() > 0):
        what = "the reference changes the loss's value and not its gradient (k1 differentiated, or a detached KL)"
        return finding("kl-zero", what=what)
    return finding("kl-absent", seen=": the reference changes neither value nor gradient")


def _tokens(policy: Tensor, delta: Tensor, pull: Array, moved: Array) -> Tokens:
    rows = np.broadcast_to(np.arange(len(pull)).reshape(-1, *[1] * (pull.ndim - 1)), pull.shape)[moved]
    logp = policy.double().cpu().numpy()[moved]
    return Tokens(
        gradient=pull[moved],
        policy=logp,
        ref=(policy - delta).double().cpu().numpy()[moved],
        row=np.unique(rows, return_inverse=True)[1],
        eps=roundoff(torch.finfo(policy.dtype).eps),
    )


def _named(explained: Explanation, means: str, tokens: Tokens) -> tuple[str, list[Finding]]:
    if explained.stage == "unknown":
        away = float((tokens.gradient * tokens.d < 0).mean())
        return "unknown", [
            finding("unknown", what=f"no known KL has this gradient; it pushes {away:.0%} of tokens away")
        ]
    fit = explained.fits[0]
    direction = fit.signs[1] if explained.stage == "free" else int(np.sign(fit.b))
    kl, findings = judge_kinds(explained.kinds, direction, means)
    if fit.bounds is not None:
        findings.append(finding("kl-clamped", low=fit.bounds[0], high=fit.bounds[1]))
    return kl, findings
