"""Losses of single tokens, and advantages, from which the benches of the check put their losses together."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from tests.audit.bench.worlds import BETA, Case, World, wrong
from torch import Tensor

Tokens = Callable[[World], Tensor]


def ppo(w: World, low: float = 0.2, high: float = 0.2, a: Tensor | None = None, r: Tensor | None = None) -> Tensor:
    a, r = w.a if a is None else a, w.r if r is None else r
    return torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))


def k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d


def k2(w: World) -> Tensor:
    return w.d.square() / 2


def ratio_k3(w: World) -> Tensor:
    """The ratio times k3, both differentiated: the reverse KL for tokens of the old policy."""
    return w.r * k3(w.d)


def live_k3(w: World) -> Tensor:
    return w.live * k3(w.d)


def score(w: World, weight: Tensor) -> Tensor:
    return weight.detach() * w.logp


def entropy(w: World) -> Tensor:
    log_p = w.logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def exact_kl(w: World) -> Tensor:
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
    later = (w.places[None, :] - w.places[:, None]).to(x)
    return (x * w.m) @ torch.where(later >= 0, gamma**later, 0 * later).T


def plus(policy: Tokens, kl: Tokens, mean: Callable[[World, Tensor], Tensor] = World.token) -> Tokens:
    return lambda w: mean(w, policy(w) + BETA * kl(w))


def normalised(x: Tensor, group: int, form: str) -> Tensor:
    y = x.reshape(-1, group)
    centred = y - y.mean(1, keepdim=True)
    return {
        "mean": centred,
        "z-score": centred / (y.std(1, keepdim=True) + 1e-4),
        "leave one out": centred * group / (group - 1),
        "batch": (y - y.mean()) / y.std(),
        "rank": y.argsort(1).argsort(1).to(y) / (group - 1) - 0.5,
        "none": y,
    }[form].flatten()


def trained_on(
    form: str, size: str, *, stale: bool = False, kind: str = "k1", beta: float = BETA, rewards: bool = True
) -> Callable[[World], Any]:
    """PPO's loss on advantages of this form; the KL's size: none, summed, mean, per token, to go, gae."""

    def loss(w: World) -> Any:
        d = (w.old - w.ref if stale else w.d).detach()
        kl = d if kind == "k1" else k3(d)
        if size in ("per token", "to go", "gae"):
            later = discounted(w, kl, {"per token": 0.0, "to go": 1.0, "gae": 0.95}[size])
            a = normalised(w.rewards, w.group, form)[:, None] - BETA * later
        else:
            total = {"none": 0 * w.rewards, "summed": w.sums(kl), "mean": w.each(kl)}[size]
            a = normalised(w.rewards - BETA * total, w.group, form)
        a = a.to(w.logp)
        extra = {"rewards": w.rewards, "group_size": w.group} if rewards else {}
        return w.token(ppo(w, a=a if a.ndim == 2 else a[:, None])), extra | {"advantages": a, "beta": beta}

    return loss


def advantages() -> Iterator[Case]:
    for form in ("z-score", "mean", "leave one out", "batch"):
        yield Case(f"{form}, no KL, beta 0", trained_on(form, "none", beta=0.0), ("none",), beta=None)
        for size, stale in product(("summed", "mean"), (False, True) if form != "batch" else (False,)):
            yield Case(f"{form}, KL {size}, stale {stale}", trained_on(form, size, stale=stale))
    for size, stale in product(("per token", "to go"), (False, True)):
        yield Case(f"KL {size}, stale {stale}", trained_on("z-score", size, stale=stale))
    yield wrong("z-score, no KL, beta passed", trained_on("z-score", "none"), "kl-absent", "none")
    yield wrong("mean, k3 summed", trained_on("mean", "summed", kind="k3"), "kl-k3-in-advantage")


def without_rewards() -> Iterator[Case]:
    """Advantages after the KL, of which nothing else is known."""
    for form, size in (("mean", "summed"), ("batch", "summed"), ("rank", "summed"), ("none", "mean")):
        yield Case(f"{form}, KL {size}", trained_on(form, size, stale=form == "batch", rewards=False), beta=None)
    for size in ("to go", "gae"):
        yield Case(f"KL {size}", trained_on("z-score", size, rewards=False), beta=None)
