"""Examines the distillation loss of an installed trainer: which divergence it reports, and which one it follows.

A `Distillation` is one loss of one host, behind a function that hands a batch to the host's own code in the host's own
layout and returns the host's own loss. It is enumerated over completions that the student samples: value and gradient
against those of the divergences of single positions, near the teacher and far from it, at the teacher itself (where
every sample's gradient should be 0); and with padding, prompt and a teacher of a larger vocabulary beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from klamp.core.types import Direction
from klamp.verify.judge import TOLERANCE
from klamp.verify.oracle import Followed, gradient_of, local_kl, name_gradient
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, random_chain


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


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """One distillation loss of a host."""

    name: str
    """The name of the function or class, and the options that make it compute this loss."""
    loss: Callable[[Sequences], Tensor]
    """The host's own loss of a batch, its coefficient 1: the mean over the trained tokens (of one row at least)."""
    means: Direction
    """The divergence between student (policy) and teacher that its name promises."""
    temperature: float = 1.0
    """What it divides the logits of both by."""


class Against(NamedTuple):
    """A measured number or gradient: the divergence that it is a multiple of, and how far it is from the one meant.

    Attributes:
        follows: the divergence and the factor.
        off: the distance from the divergence that is meant, as a share of it.
    """

    follows: Followed
    off: float


@dataclass(frozen=True, kw_only=True)
class DistillationFinding:
    """What was found out about one distillation loss."""

    term: Distillation
    """The loss that was examined."""
    value: Against | None = None
    """The expected value; None where the host refused to compute it."""
    gradient: Against | None = None
    """The expected gradient in the student's logits, the tokens held fixed."""
    near: Against | None = None
    """The gradient where student and teacher are so close that no clamp is reached."""
    far: Against | None = None
    """The gradient where student and teacher differ by many nats; None: not finite."""
    noise: float = 0.0
    """Where the student is the teacher: the root mean square of a gradient, as a share of that between strangers."""
    padding: float = 1.0
    """What the loss is multiplied by when two thirds of the positions are prompt or padding; NaN where that does it."""
    elsewhere: float = 0.0
    """The share of the gradient that falls on predictions of prompt or padding."""
    leaks: bool = False
    """Whether a token that the teacher forbids, at a prediction of the prompt, makes the gradient NaN or infinite."""
    mean: str = ""
    """What the loss of a batch is the mean over: `token`, `sequence`, or neither."""
    larger: float | str = 0.0
    """What three entries without mass, that only the teacher has, change in the value; a text: it raises that."""
    error: str = ""
    """The exception that the host raised; "" where it raised none."""


PROMPT = 2
"""Tokens of the prompt that stands before each completion."""
NO_MASS = -40.0
"""The logit of entries that only the teacher has: they take nothing from the others, so that no value may change."""


def examine_distillation(term: Distillation) -> DistillationFinding:
    """Examines one distillation loss of a trainer; whatever the trainer raises is the finding."""
    close, worlds, wide = (
        [random_chain(seed, vocab=6, length=2, eos=None, spread=x) for seed in range(2)] for x in (0.2, 1.0, 5.0)
    )
    outcomes = enumerate_outcomes(worlds[0])
    try:
        values, gradients = _expected(term, worlds)
        far = _expected(term, wide)[1]
        return DistillationFinding(
            term=term,
            value=_against(values, worlds, term, gradients=False),
            gradient=_against(gradients, worlds, term, gradients=True),
            near=_against(_expected(term, close)[1], close, term, gradients=True),
            far=_against(far, wide, term, gradients=True) if all(bool(x.isfinite().all()) for x in far) else None,
            noise=_noise_at_the_teacher(term, worlds[0]),
            padding=_padded(term, outcomes),
            mean=_mean_over(term, outcomes),
            elsewhere=_elsewhere(term, outcomes),
            leaks=_leaks(term, outcomes),
            larger=_larger(term, outcomes),
        )
    except Exception as error:  # whatever the host raises is the finding
        return DistillationFinding(term=term, error=told(error))


def of_beta(beta: float) -> Direction:
    """The divergence that the `beta` of GKD and its kin names."""
    return "forward" if beta == 0 else "reverse" if beta == 1 else "js"


def told(error: Exception) -> str:
    """An exception of a host in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": .")


def sequences(outcomes: Outcomes, row: int, *, cut: int = 0, padding: int = 0) -> Sequences:
    """One enumerated completion as a trainer has it, after a prompt and before padding, with stray logits at both.

    Args:
        outcomes: of a chain without an end, so that all have one length.
        row: which of them.
        cut: tokens to leave away at its end.
        padding: tokens of padding after it.
    """
    generator = torch.Generator().manual_seed(row)
    kept = outcomes.tokens.shape[1] - cut
    tokens = torch.zeros(1, PROMPT + kept + padding).long()
    tokens[0, PROMPT : PROMPT + kept] = outcomes.tokens[row, :kept]
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[0, PROMPT : PROMPT + kept] = True
    rows = []
    for logits in (outcomes.policy_logits[row, :kept], outcomes.teacher_logits[row, :kept]):
        stray = torch.randn(PROMPT + padding, logits.shape[-1], generator=generator, dtype=torch.float64)
        rows.append(torch.cat([stray[: PROMPT - 1], logits, stray[PROMPT - 1 :]])[None])
    student, teacher = rows
    return Sequences(student, teacher, tokens, mask)


def _loss(term: Distillation, batch: Sequences) -> Tensor:
    """The loss of one completion, summed over its tokens."""
    return term.loss(batch).double() * int(batch.mask.sum())


def _expected(term: Distillation, chains: Sequence[Chain]) -> tuple[list[Tensor], list[Tensor]]:
    """The mean of a loss and of its gradient over the completions that the student samples, for each world."""
    values, gradients = [], []
    for chain in chains:
        outcomes = enumerate_outcomes(chain)
        losses = torch.stack([_loss(term, sequences(outcomes, row)) for row in range(len(outcomes.probs))])
        total = (outcomes.probs * losses).sum()
        values.append(total.detach()[None])
        gradients.append(gradient_of(total, chain))
    return values, gradients


def _against(measured: Sequence[Tensor], chains: Sequence[Chain], term: Distillation, *, gradients: bool) -> Against:
    """What was measured in each world, against the divergences of its single positions at the loss's temperature."""
    known = []
    for chain in chains:
        teacher, student = chain.logits("teacher"), chain.logits("policy").detach()
        heated = Chain(
            policy_logits=student / term.temperature,
            ref_logits=teacher / term.temperature,
            sampler_logits=student,
            length=chain.length,
            eos=chain.eos,
        )
        exact = {each: local_kl(heated, direction=each, prefixes="sampler") for each in get_args(Direction)}
        known.append(
            {
                each: gradient_of(kl, heated) / term.temperature if gradients else kl.detach()[None]
                for each, kl in exact.items()
            }
        )
    found, meant = torch.cat([x.flatten() for x in measured]), torch.cat([x[term.means].flatten() for x in known])
    follows = name_gradient(measured, known, tolerance=TOLERANCE)
    return Against(follows, ((found - meant).norm() / meant.norm()).item())


def _noise_at_the_teacher(term: Distillation, chain: Chain) -> float:
    """The root mean square of a completion's gradient where the student is the teacher, of that between strangers."""

    def spread(world: Chain) -> float:
        outcomes = enumerate_outcomes(world)
        gradients = [gradient_of(_loss(term, sequences(outcomes, row)), world) for row in range(len(outcomes.probs))]
        return sum(p.item() * x.square().sum().item() for p, x in zip(outcomes.probs, gradients, strict=True)) ** 0.5

    strangers = spread(chain)
    return spread(replace(chain, teacher_logits=chain.policy_logits.detach())) / strangers if strangers else 0.0


def _padded(term: Distillation, outcomes: Outcomes) -> float:
    as_much = outcomes.tokens.shape[1] + PROMPT
    bare, padded = (_loss(term, sequences(outcomes, 7, padding=x)).item() for x in (0, as_much))
    return padded / bare if bare else 1.0


def _mean_over(term: Distillation, outcomes: Outcomes) -> str:
    """What a batch of a completion of one token and one of two is the mean of; "" where it is neither."""
    short, long = sequences(outcomes, 7, cut=1, padding=1), sequences(outcomes, 20)
    both = term.loss(Sequences(*(torch.cat(pair) for pair in zip(short, long, strict=True)))).item()
    one, two = (term.loss(each).item() for each in (short, long))
    means = {"token": (one + 2 * two) / 3, "sequence": (one + two) / 2}
    return next((name for name, mean in means.items() if abs(both - mean) <= TOLERANCE * abs(mean)), "")


def _elsewhere(term: Distillation, outcomes: Outcomes) -> float:
    batch = sequences(outcomes, 7, padding=2)
    size, trained = _gradient(term, batch).square().sum(-1)[0], batch.mask[0].roll(-1)
    return ((size * ~trained).sum() / size.sum()).sqrt().item() if size.sum() > 0 else 0.0


def _leaks(term: Distillation, outcomes: Outcomes) -> bool:
    batch = sequences(outcomes, 7, padding=2)
    teacher = batch.teacher.clone()
    teacher[:, 0, 1] = -torch.inf
    return not bool(_gradient(term, batch._replace(teacher=teacher)).isfinite().all())


def _gradient(term: Distillation, batch: Sequences) -> Tensor:
    """The gradient of a batch's loss in the student's logits, [B, L, V]."""
    student = batch.student.detach().requires_grad_()
    loss = _loss(term, batch._replace(student=student))
    (found,) = torch.autograd.grad(loss, student, allow_unused=True) if loss.requires_grad else (None,)
    return torch.zeros_like(student) if found is None else found


def _larger(term: Distillation, outcomes: Outcomes) -> float | str:
    batch = sequences(outcomes, 7)
    extra = torch.full((*batch.teacher.shape[:2], 3), NO_MASS, dtype=torch.float64)
    try:
        found = term.loss(batch._replace(teacher=torch.cat([batch.teacher, extra], dim=-1)))
    except Exception as error:  # a refusal, or what the host stumbles over
        return told(error)
    bare = term.loss(batch).item()
    return found.item() / bare - 1 if bare else 0.0
