"""Batches of completions for somebody's loss, and how far its expected gradient is from a divergence's.

The distance is enumerated over all completions, and shares no code with the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from klamp.core.types import Direction

PROMPT = 2  # tokens before each completion
WORDS = 320  # of a drawn vocabulary: more than any usual head
PAIRED = 18  # words where all completions of two tokens are enumerated


class Scores(NamedTuple):
    """Log-probabilities of the tokens of completions, [B, T] each, and their mask."""

    policy: Tensor
    ref: Tensor
    old: Tensor
    mask: Tensor


class Sequences(NamedTuple):
    """What a trainer has of a batch of prompts and completions."""

    student: Tensor  # logits [B, L, V]; those at a position are of the token after it; has the gradient
    teacher: Tensor  # the teacher's logits, [B, L, W]
    tokens: Tensor  # prompt, completion, padding, [B, L]
    mask: Tensor  # True on the tokens of the completion, [B, L]
    old: Tensor  # the student's logits when it sampled the tokens, [B, L, V]

    @property
    def aligned(self) -> Sequences:
        """The same with the logits of each token at its own position, for losses whose caller shifts: [B, L - 1]."""
        student, teacher, old = (x[:, :-1] for x in (self.student, self.teacher, self.old))
        return Sequences(student, teacher, self.tokens[:, 1:], self.mask[:, 1:], old)

    @property
    def scores(self) -> Scores:
        """Of the completions' tokens."""
        student, teacher, tokens, mask, old = self.aligned
        at = slice(PROMPT - 1, None)
        now, ref, before = (logprobs_of(x, tokens)[:, at] for x in (student, teacher, old))
        return Scores(now, ref, before, mask[:, at])

    @classmethod
    def drawn(cls, *, moved: float = 0.0, padding: int = 0, seed: int = 0) -> Sequences:
        """Six completions of at most twelve tokens that the student sampled, in float32."""
        g = torch.Generator().manual_seed(seed)
        logits = 1.5 * torch.randn(6, PROMPT + 12, WORDS, generator=g)
        teacher, old = (logits + x * torch.randn(logits.shape, generator=g) for x in (0.7, moved))
        ids = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=g).view(6, -1).roll(1, 1)
        places = torch.arange(PROMPT + 12)
        mask = (places >= PROMPT) & (places < PROMPT + torch.tensor([12, 12, 9, 7, 5, 4])[:, None])
        student, teacher, old = (pad(x, (0, 0, 0, padding)) for x in (logits, teacher, old))
        ids, mask = (pad(x, (0, padding)) for x in (ids, mask))
        return cls(student.requires_grad_(), teacher, ids, mask, old)

    @classmethod
    def enumerated(cls, length: int, moved: float) -> tuple[Sequences, Tensor]:
        """Every completion of one or two tokens, and the prefix of each of its tokens: 0, or 1 + the first token."""
        g, words = torch.Generator().manual_seed(1), WORDS if length == 1 else PAIRED
        ids = torch.cartesian_prod(*[torch.arange(words)] * length).view(-1, length)
        prefixes = torch.cat([torch.zeros(len(ids), 1, dtype=torch.long), 1 + ids[:, :-1]], 1)
        logits = 1.5 * torch.randn(1 + words, words, generator=g)
        tables = (logits + x * torch.randn(logits.shape, generator=g) for x in (0.0, 0.7, moved))
        student, teacher, old = (pad(x[prefixes], (0, 0, PROMPT - 1, 1)) for x in tables)
        tokens, mask = pad(ids, (PROMPT, 0)), pad(torch.ones_like(ids), (PROMPT, 0)) > 0
        return cls(student.requires_grad_(), teacher, tokens, mask, old), prefixes


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token, [B, L]."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def gradient_of(loss: Tensor, x: Tensor) -> Tensor:
    """The gradient of a loss, 0 where it does not depend on x."""
    gradient = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)[0] if loss.requires_grad else None
    return torch.zeros_like(x) if gradient is None else gradient


def distance(
    loss: Callable[[Sequences, Scores], Tensor],
    means: Direction,
    length: int,
    *,
    moved: float,
    temperature: float = 1.0,
    whole: Callable[..., Tensor] | None = None,
) -> float:
    """How far the expected gradient is from the divergence's, as a share of the latter.

    Args:
        loss: what it makes of a batch; a mean over tokens, or relative to the policy loss of `whole`.
        means: the divergence of each prefix.
        length: tokens of each completion, 1 or 2.
        moved: how far the policy moved since it sampled the tokens.
        temperature: what the loss divides logits by; it may multiply itself by the temperature or its square.
        whole: the loss with a policy loss beside it, of scores and advantages.
    """
    batch, prefixes = Sequences.enumerated(length, moved)
    scores, scale = batch.scores, 1.0 / len(prefixes)
    if whole is not None:
        on_policy, ones = scores._replace(old=scores.policy.detach()), torch.ones(len(prefixes))
        unit = whole(*on_policy, -ones) - whole(*on_policy, 0 * ones)
        scale = length * float(gradient_of(unit, scores.policy).mean())
    places = slice(PROMPT - 1, -1)
    old = (batch.old / temperature).log_softmax(-1)[:, places]
    weights = old.gather(-1, batch.tokens[:, PROMPT:, None])[..., 0].sum(1).exp()[:, None, None]
    follows = gradient_of(loss(batch, scores), batch.student) / scale
    promised = gradient_of(_divergence(batch, places, temperature, means), batch.student) / length
    at, blank = prefixes.flatten(), follows.new_zeros(1 + follows.shape[-1], follows.shape[-1])
    got, right = (blank.index_add(0, at, (weights * x[:, places]).flatten(0, 1)) for x in (follows, promised))
    powers = (1, temperature, temperature**2) if temperature != 1 else (1,)
    return min(float((got - x * right).norm() / (x * right).norm()) for x in powers)


def _divergence(batch: Sequences, places: slice, temperature: float, means: Direction) -> Tensor:
    s, t = ((x[:, places] / temperature).log_softmax(-1) for x in (batch.student, batch.teacher))
    m = torch.logaddexp(s, t) - torch.tensor(2.0).log()
    pairs = {"reverse": ((1.0, s, t),), "forward": ((1.0, t, s),), "js": ((0.5, s, m), (0.5, t, m))}[means]
    return sum((x * (p.exp() * (p - q)).sum() for x, p, q in pairs), torch.zeros(()))
