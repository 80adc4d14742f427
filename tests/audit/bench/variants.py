"""Hand-written losses as people write them: 25 that are right and 32 that are wrong, each in three worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.audit.bench.sound import discounted, k3, ppo
from tests.audit.bench.worlds import BETA, Case, World
from torch import Tensor

import klamp

Tokens = Callable[[World], Tensor]


def plus(policy: Tokens, kl: Tokens) -> Tokens:
    """One token mean of a policy loss and a KL."""
    return lambda w: w.token(policy(w) + BETA * kl(w))


def sequences(policy: Tokens, kl: Tokens) -> Tokens:
    """One sequence mean of a policy loss and a KL."""
    return lambda w: w.sequence(policy(w) + BETA * kl(w))


def live_k3(w: World) -> Tensor:
    return w.live * k3(w.d)


def ratio_k3(w: World) -> Tensor:
    return w.r * k3(w.d)


def score_k1(w: World) -> Tensor:
    return w.logp * w.d.detach()


def k2(w: World) -> Tensor:
    return w.d.square() / 2


def reinforce(w: World) -> Tensor:
    return -w.a * w.logp


def sequence_ratio(w: World) -> Tensor:
    return (-w.a * w.each(w.log_r)[:, None].exp()).expand_as(w.logp)


def sapo(w: World) -> Tensor:
    heat = torch.where(w.a > 0, 1.0, 1.05)
    return -w.a * torch.sigmoid(heat * (w.r - 1)) * 4 / heat


def filled(w: World) -> Tensor:
    kl = torch.where(w.mask, live_k3(w), torch.zeros(()))
    return ((ppo(w) * w.m).sum(1) / w.m.sum(1) + BETA * kl.sum(1) / w.m.sum(1)).mean()


def own(off: bool) -> Tokens:
    return lambda w: klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=w.old if off else None)


RIGHT: dict[str, tuple[Callable[[World], Any], str, str]] = {
    "ppo, k2": (plus(ppo, k2), "ppo_clip", "token"),
    "ppo, live ratio x k3": (plus(ppo, live_k3), "ppo_clip", "token"),
    "ppo, ratio x k3": (plus(ppo, ratio_k3), "ppo_clip", "token"),
    "ppo, k1 as a score": (plus(ppo, score_k1), "ppo_clip", "token"),
    "ppo, ratio x k1 detached": (plus(ppo, lambda w: w.r * w.d.detach()), "ppo_clip", "token"),
    "ppo, detached ratio x k2": (plus(ppo, lambda w: w.r.detach() * k2(w)), "ppo_clip", "token"),
    "ppo, sequence mean, k2": (sequences(ppo, k2), "ppo_clip", "sequence"),
    "ppo, sequence mean, ratio x k3": (sequences(ppo, ratio_k3), "ppo_clip", "sequence"),
    "ratio, ratio x k3": (plus(lambda w: -w.a * w.r, ratio_k3), "", "token"),
    "reinforce, k2": (plus(reinforce, k2), "1", "token"),
    "reinforce, k1 as a score": (sequences(reinforce, score_k1), "1", "sequence"),
    "sequence ratio, ratio x k3": (sequences(sequence_ratio, ratio_k3), "", "sequence"),
    "cispo, k2": (plus(lambda w: -w.a * w.r.detach().clamp(max=1.28) * w.logp, k2), "", "token"),
    "sapo, ratio x k3": (sequences(sapo, ratio_k3), "", "sequence"),
    "truncated sampler weight, ratio x k3": (
        plus(lambda w: ppo(w) * (w.old - w.sampler).exp().clamp(max=2), ratio_k3),
        "ppo_clip",
        "token",
    ),
    "wide clip (0.3, 0.4) passed": (
        lambda w: (w.token(ppo(w, 0.3, 0.4) + BETA * ratio_k3(w)), {"clip": (0.3, 0.4)}),
        "",
        "token",
    ),
    "KL in the advantage, in the loss": (lambda w: w.token(ppo(w, a=w.a - BETA * w.d.detach())), "", "token"),
    "reward-to-go of k1": (plus(lambda w: ppo(w, 9, 9), lambda w: w.r * discounted(w, w.d, 1).detach()), "", "token"),
    "klamp.kl_penalty": (plus(ppo, own(False)), "ppo_clip", "token"),
    "klamp.kl_penalty, off-policy": (plus(ppo, own(True)), "ppo_clip", "token"),
    "one of eight micro-batches": (lambda w: w.token(-w.a * w.r + BETA * ratio_k3(w)) / 8, "", "token"),
    "two masked means added": (lambda w: w.token(ppo(w)) + BETA * w.token(ratio_k3(w)), "ppo_clip", "token"),
    "fixed length": (lambda w: w.sums(ppo(w) + BETA * ratio_k3(w)).sum() / (len(w.logp) * 64), "ppo_clip", "token"),
    "boolean index": (lambda w: (ppo(w) + BETA * live_k3(w))[w.mask].mean(), "ppo_clip", "token"),
    "masked before the mean of each completion": (filled, "ppo_clip", "sequence"),
}
"""Name -> the loss, and what a verdict that states them must say about policy loss and mean."""


def shifted_mask(w: World) -> Tensor:
    m = w.m.roll(1, 1)
    m[:, 0] = 0
    return ((ppo(w) + BETA * live_k3(w)) * m).sum() / m.sum()


def no_grad(w: World) -> Tensor:
    policy_loss = ppo(w)
    with torch.no_grad():
        kl = k3(w.d)
    return w.token(policy_loss + BETA * kl)


def passed(w: World, ref: Tensor) -> Any:
    """The loss is right about a reference that is not."""
    return w.token(ppo(w) + BETA * (w.logp - ref).square() / 2), {"ref_logprobs": ref}


WRONG: dict[str, tuple[Callable[[World], Any], tuple[str, ...], tuple[str, ...]]] = {
    "k3 differentiated": (plus(ppo, lambda w: k3(w.d)), ("kl-forward",), ("forward",)),
    "k3 differentiated, sequence mean": (sequences(ppo, lambda w: k3(w.d)), ("kl-forward",), ("forward",)),
    "detached ratio x k3": (
        plus(ppo, lambda w: w.r.detach() * k3(w.d)),
        ("kl-forward", "kl-swapped"),
        ("forward", "forward or swapped"),
    ),
    "k1 differentiated": (plus(ppo, lambda w: w.d), ("kl-zero",), ("zero",)),
    "detached ratio x k1": (plus(ppo, lambda w: w.r.detach() * w.d), ("kl-zero",), ("zero",)),
    "k1 with the wrong sign": (plus(ppo, lambda w: -w.d), ("kl-zero", "kl-away"), ("zero", "away")),
    "k3 swapped": (plus(ppo, lambda w: k3(-w.d)), ("kl-swapped",), ("swapped",)),
    "absolute log-ratio": (plus(ppo, lambda w: w.d.abs()), ("kl-sign",), ("sign",)),
    "k1 cut at 0": (plus(ppo, lambda w: w.d.clamp(min=0)), ("kl-step",), ("step",)),
    "k2 subtracted": (plus(ppo, lambda w: -k2(w)), ("kl-away",), ("away",)),
    "ratio x k3 subtracted": (plus(ppo, lambda w: -ratio_k3(w)), ("kl-away",), ("away",)),
    "ratio x k3 subtracted, sequence mean": (sequences(ppo, lambda w: -ratio_k3(w)), ("kl-away",), ("away",)),
    "k3 differentiated and subtracted": (plus(ppo, lambda w: -k3(w.d)), ("kl-away",), ("away",)),
    "KL added to the advantage": (lambda w: w.token(ppo(w, 9, 9, w.a + BETA * w.d.detach())), ("kl-away",), ("away",)),
    "KL under no_grad": (no_grad, ("kl-detached", "kl-absent"), ("none",)),
    "KL of the detached policy": (
        plus(ppo, lambda w: k3(w.logp.detach() - w.ref)),
        ("kl-detached", "kl-absent"),
        ("none",),
    ),
    "KL forgotten": (lambda w: (w.token(ppo(w)), {"kl_in": "loss"}), ("kl-absent",), ("none",)),
    "policy loss reversed": (
        plus(lambda w: torch.minimum(w.a * w.r, w.a * w.r.clamp(0.8, 1.2)), ratio_k3),
        ("policy-reversed",),
        (),
    ),
    "policy loss reversed, reinforce": (plus(lambda w: w.a * w.logp, k2), ("policy-reversed",), ()),
    "both reversed": (lambda w: -w.token(-w.a * w.r + BETA * ratio_k3(w)), ("policy-reversed", "kl-away"), ()),
    "ratio detached": (plus(lambda w: -w.a * w.r.detach(), ratio_k3), ("policy-absent",), ()),
    "KL averaged over all places": (
        lambda w: w.token(ppo(w)) + BETA * (ratio_k3(w) * w.m).mean(),
        ("beta-off",),
        (),
    ),
    "KL over padding": (lambda w: w.token(ppo(w)) + BETA * ratio_k3(w).mean(), ("off-mask-gradient",), ()),
    "loss over padding": (lambda w: (ppo(w) + BETA * ratio_k3(w)).mean(), ("off-mask-gradient",), ()),
    "KL summed beside a token mean": (
        lambda w: w.token(ppo(w)) + BETA * w.sums(ratio_k3(w)).mean(),
        ("beta-off",),
        (),
    ),
    "square without 1/2": (plus(ppo, lambda w: w.d.square()), ("beta-off",), ()),
    "beta squared": (lambda w: w.token(ppo(w) + BETA**2 * ratio_k3(w)), ("beta-off",), ()),
    "reference late": (plus(ppo, lambda w: (w.logp - w.ref.roll(1, 1)).square() / 2), ("shift",), ()),
    "reference late, and passed so": (lambda w: passed(w, w.ref.roll(1, 1)), ("shift",), ()),
    "probabilities for the reference": (lambda w: passed(w, w.ref.exp()), ("not-log-probabilities",), ()),
    "policy / ref weighs k1": (plus(ppo, lambda w: w.d.exp() * w.d), ("kl-neither",), ("neither",)),
    "mask one place late": (shifted_mask, ("off-mask-gradient",), ()),
}
"""Name -> the loss, codes of which one names the fault, classes; those without a class have their fault elsewhere."""


def cases() -> Iterator[Case]:
    """All of them."""
    for name, (loss, surrogate, mean) in RIGHT.items():
        yield Case(name, loss, surrogate=surrogate, mean=mean)
    for name, (loss, codes, kl) in WRONG.items():
        yield Case(name, loss, ok=False, codes=codes, kl=kl, beta=None)
