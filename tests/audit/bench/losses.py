"""Losses of single tokens, from which the benches of the check put their losses together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.audit.bench.worlds import BETA, World
from torch import Tensor

Tokens = Callable[[World], Tensor]


def ppo(w: World, low: float = 0.2, high: float = 0.2, a: Tensor | None = None, r: Tensor | None = None) -> Tensor:
    """PPO's clipped loss."""
    a, r = w.a if a is None else a, w.r if r is None else r
    return torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d."""
    return torch.expm1(-d) + d


def k2(w: World) -> Tensor:
    """Half the square of the log-ratio."""
    return w.d.square() / 2


def ratio_k3(w: World) -> Tensor:
    """The ratio times k3, both differentiated: the reverse KL for tokens of the old policy."""
    return w.r * k3(w.d)


def live_k3(w: World) -> Tensor:
    """k3 times a ratio that is 1."""
    return w.live * k3(w.d)


def score(w: World, weight: Tensor) -> Tensor:
    """A detached weight times the log-probability."""
    return weight.detach() * w.logp


def entropy(w: World) -> Tensor:
    """The exact entropy."""
    log_p = w.logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def exact_kl(w: World) -> Tensor:
    """The exact KL(policy||ref)."""
    log_p, log_q = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def head_of(w: World, size: int = 4, *, whose: Tensor | None = None, tail: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher at the teacher's largest logits (or another's); a bucket of the rest."""
    at = (w.ref_logits if whose is None else whose.detach()).topk(size).indices
    head = [x.log_softmax(-1).gather(-1, at) for x in (w.logits, w.ref_logits)]
    if tail:
        head = [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in head]
    return head[0], head[1]


def discounted(w: World, x: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of this and later tokens."""
    later = (w.places[None, :] - w.places[:, None]).to(x)
    return (x * w.m) @ torch.where(later >= 0, gamma**later, 0 * later).T


def plus(policy: Tokens, kl: Tokens, mean: Callable[[World, Tensor], Tensor] = World.token) -> Tokens:
    """One mean of a policy loss and a KL."""
    return lambda w: mean(w, policy(w) + BETA * kl(w))
