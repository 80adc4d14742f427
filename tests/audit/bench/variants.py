"""Hand-written losses as people write them: 25 that are right and 30 that are wrong, each in three worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tests.audit.bench.sound import discounted, k3, ppo
from tests.audit.bench.worlds import BETA, Case, World
from torch import Tensor

import klamp


class Right(NamedTuple):
    """A right loss, and what a verdict that states them must say about policy loss and mean."""

    loss: Callable[[World], Any]
    surrogate: str = ""
    mean: str = ""
    beta: float | None = BETA
    kl: tuple[str, ...] = ("reverse",)


def plus(policy: Callable[[World], Tensor], kl: Callable[[World], Tensor]) -> Callable[[World], Tensor]:
    """One token mean of a policy loss and a KL."""
    return lambda w: w.token(policy(w) + BETA * kl(w))


def k2(w: World) -> Tensor:
    return w.d.square() / 2


def live_k3(w: World) -> Tensor:
    return w.live * k3(w.d)


def ratio_k3(w: World) -> Tensor:
    return w.r * k3(w.d)


def score_k1(w: World) -> Tensor:
    return w.logp * w.d.detach()


def ratio_loss(w: World) -> Tensor:
    return -w.a * w.r


def reinforce(w: World) -> Tensor:
    return -w.a * w.logp


def sequence_ratio(w: World) -> Tensor:
    return (-w.a * w.each(w.log_r)[:, None].exp()).expand_as(w.logp)


def cispo(w: World) -> Tensor:
    return -w.a * w.r.detach().clamp(max=1.28) * w.logp


def sapo(w: World) -> Tensor:
    heat = torch.where(w.a > 0, 1.0, 1.05)
    return -w.a * torch.sigmoid(heat * (w.r - 1)) * 4 / heat


def truncated(w: World) -> Tensor:
    return ppo(w) * (w.old - w.sampler).exp().clamp(max=2)


def in_advantage(w: World) -> Tensor:
    return w.token(ppo(w, a=w.a - BETA * w.d.detach()))


def to_go(w: World) -> Tensor:
    return w.token(ppo(w, 9, 9) + BETA * w.r * discounted(w, w.d, 1.0).detach())


def own(w: World) -> Tensor:
    return w.token(ppo(w) + BETA * klamp.kl_penalty(w.logp, w.ref, w.mask))


def own_off_policy(w: World) -> Tensor:
    return w.token(ppo(w) + BETA * klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=w.old))


def accumulated(w: World) -> Tensor:
    return w.token(ratio_loss(w) + BETA * ratio_k3(w)) / 8


def added_apart(w: World) -> Tensor:
    kl = (w.r * k3(w.d) * w.m).sum() / w.m.sum()
    return (ppo(w) * w.m).sum() / w.m.sum() + BETA * kl


def per_completion(w: World) -> Tensor:
    return w.sums(ppo(w) + BETA * ratio_k3(w)).sum() / (len(w.logp) * 64)


def indexed(w: World) -> Tensor:
    return (ppo(w) + BETA * live_k3(w))[w.mask].mean()


def filled(w: World) -> Tensor:
    kl = torch.where(w.mask, live_k3(w), torch.zeros(()))
    return ((ppo(w) * w.m).sum(1) / w.m.sum(1) + BETA * kl.sum(1) / w.m.sum(1)).mean()


def no_kl(w: World) -> Any:
    return w.token(ppo(w)), {"beta": 0.0}


def sequences(policy: Callable[[World], Tensor], kl: Callable[[World], Tensor]) -> Callable[[World], Tensor]:
    """One sequence mean of a policy loss and a KL."""
    return lambda w: w.sequence(policy(w) + BETA * kl(w))


RIGHT: dict[str, Right] = {
    "ppo, k2": Right(plus(ppo, k2), "ppo_clip", "token"),
    "ppo, live ratio x k3": Right(plus(ppo, live_k3), "ppo_clip", "token"),
    "ppo, ratio x k3": Right(plus(ppo, ratio_k3), "ppo_clip", "token"),
    "ppo, k1 as a score": Right(plus(ppo, score_k1), "ppo_clip", "token"),
    "ppo, ratio x k1 detached": Right(plus(ppo, lambda w: w.r * w.d.detach()), "ppo_clip", "token"),
    "ppo, detached ratio x k2": Right(plus(ppo, lambda w: w.r.detach() * k2(w)), "ppo_clip", "token"),
    "ppo, sequence mean, k2": Right(sequences(ppo, k2), "ppo_clip", "sequence"),
    "ppo, sequence mean, ratio x k3": Right(sequences(ppo, ratio_k3), "ppo_clip", "sequence"),
    "ratio, ratio x k3": Right(plus(ratio_loss, ratio_k3), "", "token"),
    "reinforce, k2": Right(plus(reinforce, k2), "1", "token"),
    "reinforce, k1 as a score": Right(sequences(reinforce, score_k1), "1", "sequence"),
    "sequence ratio, ratio x k3": Right(sequences(sequence_ratio, ratio_k3), "", "sequence"),
    "cispo, k2": Right(plus(cispo, k2), "", "token"),
    "sapo, ratio x k3": Right(sequences(sapo, ratio_k3), "", "sequence"),
    "truncated sampler weight, ratio x k3": Right(plus(truncated, ratio_k3), "ppo_clip", "token"),
    "wide clip (0.3, 0.4) passed": Right(
        lambda w: (w.token(ppo(w, 0.3, 0.4) + BETA * ratio_k3(w)), {"clip": (0.3, 0.4)}), "", "token"
    ),
    "KL in the advantage, in the loss": Right(in_advantage, "", "token", beta=None),
    "reward-to-go of k1": Right(to_go, "", "token"),
    "klamp.kl_penalty": Right(own, "ppo_clip", "token"),
    "klamp.kl_penalty, off-policy": Right(own_off_policy, "ppo_clip", "token"),
    "one of eight micro-batches": Right(accumulated, "", "token"),
    "two masked means added": Right(added_apart, "ppo_clip", "token"),
    "fixed length": Right(per_completion, "ppo_clip", "token"),
    "boolean index": Right(indexed, "ppo_clip", "token"),
    "masked before the mean of each completion": Right(filled, "ppo_clip", "sequence"),
}


class Wrong(NamedTuple):
    """A wrong loss, and one code or class that names the fault."""

    loss: Callable[[World], Any]
    codes: tuple[str, ...]
    kl: tuple[str, ...] = ()


def padded_mean(w: World) -> Tensor:
    return w.token(ppo(w)) + BETA * (ratio_k3(w) * w.m).mean()


def over_padding(w: World) -> Tensor:
    return w.token(ppo(w)) + BETA * ratio_k3(w).mean()


def summed_kl(w: World) -> Tensor:
    return w.token(ppo(w)) + BETA * w.sums(ratio_k3(w)).mean()


def shifted_ref(w: World) -> Tensor:
    d = w.logp - w.ref.roll(1, 1)
    return w.token(ppo(w) + BETA * d.square() / 2)


def shifted_mask(w: World) -> Tensor:
    m = w.m.roll(1, 1)
    m[:, 0] = 0
    return ((ppo(w) + BETA * live_k3(w)) * m).sum() / m.sum()


def shifted_input(w: World) -> Any:
    moved = w.ref.roll(1, 1)
    return w.token(ppo(w) + BETA * (w.logp - moved).square() / 2), {"ref_logprobs": moved}


def probabilities(w: World) -> Any:
    ref = w.ref.exp()
    return w.token(ppo(w) + BETA * (w.logp - ref).square() / 2), {"ref_logprobs": ref}


def no_grad(w: World) -> Tensor:
    policy_loss = ppo(w)
    with torch.no_grad():
        kl = k3(w.d)
    return w.token(policy_loss + BETA * kl)


def clamped(w: World) -> Tensor:
    """k1 without its negative values."""
    return w.d.clamp(min=0)


WRONG: dict[str, Wrong] = {
    "k3 differentiated": Wrong(plus(ppo, lambda w: k3(w.d)), ("kl-forward",), ("forward",)),
    "k3 differentiated, sequence mean": Wrong(sequences(ppo, lambda w: k3(w.d)), ("kl-forward",), ("forward",)),
    "detached ratio x k3": Wrong(
        plus(ppo, lambda w: w.r.detach() * k3(w.d)), ("kl-forward", "kl-swapped"), ("forward", "forward or swapped")
    ),
    "k1 differentiated": Wrong(plus(ppo, lambda w: w.d), ("kl-zero",), ("zero",)),
    "detached ratio x k1": Wrong(plus(ppo, lambda w: w.r.detach() * w.d), ("kl-zero",), ("zero",)),
    "k1 with the wrong sign": Wrong(plus(ppo, lambda w: -w.d), ("kl-zero", "kl-away"), ("zero", "away")),
    "k3 swapped": Wrong(plus(ppo, lambda w: k3(-w.d)), ("kl-swapped",), ("swapped",)),
    "absolute log-ratio": Wrong(plus(ppo, lambda w: w.d.abs()), ("kl-sign",), ("sign",)),
    "k1 cut at 0": Wrong(plus(ppo, clamped), ("kl-step",), ("step",)),
    "k2 subtracted": Wrong(plus(ppo, lambda w: -k2(w)), ("kl-away",), ("away",)),
    "ratio x k3 subtracted": Wrong(plus(ppo, lambda w: -ratio_k3(w)), ("kl-away",), ("away",)),
    "ratio x k3 subtracted, sequence mean": Wrong(sequences(ppo, lambda w: -ratio_k3(w)), ("kl-away",), ("away",)),
    "k3 differentiated and subtracted": Wrong(plus(ppo, lambda w: -k3(w.d)), ("kl-away",), ("away",)),
    "KL added to the advantage": Wrong(
        lambda w: w.token(ppo(w, 9, 9, a=w.a + BETA * w.d.detach())), ("kl-away",), ("away",)
    ),
    "KL under no_grad": Wrong(no_grad, ("kl-detached", "kl-absent"), ("none",)),
    "KL of the detached policy": Wrong(
        plus(ppo, lambda w: k3(w.logp.detach() - w.ref)), ("kl-detached", "kl-absent"), ("none",)
    ),
    "KL forgotten": Wrong(lambda w: (w.token(ppo(w)), {"kl_in": "loss"}), ("kl-absent",), ("none",)),
    "policy loss reversed": Wrong(
        plus(lambda w: torch.minimum(w.a * w.r, w.a * w.r.clamp(0.8, 1.2)), ratio_k3), ("policy-reversed",)
    ),
    "policy loss reversed, reinforce": Wrong(plus(lambda w: w.a * w.logp, k2), ("policy-reversed",)),
    "both terms reversed": Wrong(lambda w: -w.token(-w.a * w.r + BETA * ratio_k3(w)), ("policy-reversed", "kl-away")),
    "ratio detached": Wrong(plus(lambda w: -w.a * w.r.detach(), ratio_k3), ("policy-absent",)),
    "KL averaged over all places": Wrong(padded_mean, ("beta-off",)),
    "KL over padding": Wrong(over_padding, ("off-mask-gradient",)),
    "loss over padding": Wrong(lambda w: (ppo(w) + BETA * ratio_k3(w)).mean(), ("off-mask-gradient",)),
    "KL summed beside a token mean": Wrong(summed_kl, ("beta-off",)),
    "square without 1/2": Wrong(plus(ppo, lambda w: w.d.square()), ("beta-off",)),
    "beta squared": Wrong(lambda w: w.token(ppo(w) + BETA**2 * ratio_k3(w)), ("beta-off",)),
    "reference one place late": Wrong(shifted_ref, ("shift",)),
    "reference one place late, and passed so": Wrong(shifted_input, ("shift",)),
    "probabilities for the reference": Wrong(probabilities, ("not-log-probabilities",)),
    "policy / ref weighs k1": Wrong(plus(ppo, lambda w: w.d.exp() * w.d), ("kl-neither",), ("neither",)),
    "mask one place late": Wrong(shifted_mask, ("off-mask-gradient",)),
}
"""32 losses; those without a class have their fault elsewhere."""


def cases() -> Iterator[Case]:
    """All of them."""
    for name, right in RIGHT.items():
        yield Case(name, right.loss, kl=right.kl, beta=right.beta, surrogate=right.surrogate, mean=right.mean)
    for name, wrong in WRONG.items():
        yield Case(name, wrong.loss, ok=False, codes=wrong.codes, kl=wrong.kl, beta=None)
