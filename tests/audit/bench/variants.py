"""Hand-written losses as people write them: 25 that are right and 34 that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.audit.bench.losses import Tokens, discounted, k2, k3, live_k3, plus, ppo, ratio_k3, score
from tests.audit.bench.worlds import BETA, Case, World, pick, wrong
from torch import Tensor

import klamp


def k1_score(w: World) -> Tensor:
    return score(w, w.d)


def forward(w: World) -> Tensor:
    return k3(w.d)


def ratio(w: World) -> Tensor:
    return -w.a * w.r


def reinforce(w: World) -> Tensor:
    return -w.a * w.logp


def sequence_ratio(w: World) -> Tensor:
    return (-w.a * w.each(w.log_r)[:, None].exp()).expand_as(w.logp)


def sapo(w: World) -> Tensor:
    heat = torch.where(w.a > 0, 1.0, 1.05)
    return -w.a * torch.sigmoid(heat * (w.r - 1)) * 4 / heat


def own(old: bool) -> Tokens:
    return lambda w: klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=w.old if old else None)


def with_baseline(w: World) -> Any:
    """The KL in the advantage, less its mean over the batch, which is passed."""
    d = w.old - w.ref
    return w.token(-w.r * (w.a - BETA * (d - w.token(d)))), {"baseline": w.token(d)}


def right(name: str, loss: Callable[[World], Any], surrogate: str = "ppo_clip", mean: str = "token") -> Case:
    return Case(name, loss, surrogate=surrogate, mean=mean)


RIGHT = [
    right("ppo, k2", plus(ppo, k2)),
    right("ppo, live ratio x k3", plus(ppo, live_k3)),
    right("ppo, ratio x k3", plus(ppo, ratio_k3)),
    right("ppo, k1 as a score", plus(ppo, k1_score)),
    right("ppo, ratio x k1 detached", plus(ppo, lambda w: w.r * w.d.detach())),
    right("ppo, detached ratio x k2", plus(ppo, lambda w: w.r.detach() * k2(w))),
    right("ppo, sequence mean, k2", plus(ppo, k2, World.sequence), mean="sequence"),
    right("ppo, sequence mean, ratio x k3", plus(ppo, ratio_k3, World.sequence), mean="sequence"),
    right("ratio, ratio x k3", plus(ratio, ratio_k3), ""),
    right("reinforce, k2", plus(reinforce, k2), "1"),
    right("reinforce, k1 as a score", plus(reinforce, k1_score, World.sequence), "1", "sequence"),
    right("sequence ratio, ratio x k3", plus(sequence_ratio, ratio_k3, World.sequence), "", "sequence"),
    right("cispo, k2", plus(lambda w: -w.a * score(w, w.r.clamp(max=1.28)), k2), ""),
    right("sapo, ratio x k3", plus(sapo, ratio_k3, World.sequence), "", "sequence"),
    right("truncated sampler weight", plus(lambda w: ppo(w) * (w.old - w.sampler).exp().clamp(max=2), ratio_k3)),
    right("clip passed", lambda w: (w.token(ppo(w, 0.3, 0.4) + BETA * ratio_k3(w)), {"clip": (0.3, 0.4)}), ""),
    right("KL in the advantage, in the loss", lambda w: w.token(ppo(w, a=w.a - BETA * w.d.detach())), ""),
    right("reward-to-go of k1", plus(lambda w: ppo(w, 9, 9), lambda w: w.r * discounted(w, w.d).detach()), ""),
    right("KL in the advantage less a scalar baseline", with_baseline, ""),
    right("klamp.kl_penalty", plus(ppo, own(False))),
    right("klamp.kl_penalty, off-policy", plus(ppo, own(True))),
    right("one of eight micro-batches", lambda w: w.token(-w.a * w.r + BETA * ratio_k3(w)) / 8, ""),
    right("two masked means added", lambda w: w.token(ppo(w)) + BETA * w.token(ratio_k3(w))),
    right("fixed length", lambda w: w.sums(ppo(w) + BETA * ratio_k3(w)).sum() / (len(w.logp) * 64)),
    right("boolean index", lambda w: (ppo(w) + BETA * live_k3(w))[w.mask].mean()),
]


def late(x: Tensor) -> Tensor:
    """One place late."""
    return torch.cat([0 * x[:, :1], x[:, :-1]], 1)


def no_grad(w: World) -> Tensor:
    policy_loss = ppo(w)
    with torch.no_grad():
        kl = k3(w.d)
    return w.token(policy_loss + BETA * kl)


def passed(w: World, ref: Tensor) -> Any:
    """The loss is right about a reference that is not."""
    return w.token(ppo(w) + BETA * (w.logp - ref).square() / 2), {"ref_logprobs": ref}


def shifted_twice(w: World) -> Any:
    """The labels are shifted once more: all log-probabilities are those of the next place's token."""
    ids = w.ids.roll(-1, 1)
    logp, ref = pick(w.logits, ids), pick(w.ref_logits, ids)
    loss = w.token(-w.a * logp + BETA * (logp - ref).square() / 2)
    hidden = {"old_logprobs": None, "sampler_logprobs": None}
    return loss, {"policy_logprobs": logp, "ref_logprobs": ref, **hidden, **w.logits_passed()}


WRONG = [
    wrong("k3 differentiated", plus(ppo, forward), "kl-forward", "forward"),
    wrong("k3 differentiated, sequence mean", plus(ppo, forward, World.sequence), "kl-forward", "forward"),
    wrong(
        "detached ratio x k3",
        plus(ppo, lambda w: w.r.detach() * k3(w.d)),
        "kl-forward kl-swapped",
        "forward forward_or_swapped",
    ),
    wrong("k1 differentiated", plus(ppo, lambda w: w.d), "kl-zero", "zero"),
    wrong("detached ratio x k1", plus(ppo, lambda w: w.r.detach() * w.d), "kl-zero", "zero"),
    wrong("k1 with the wrong sign", plus(ppo, lambda w: -w.d), "kl-zero kl-away", "zero away"),
    wrong("k3 swapped", plus(ppo, lambda w: k3(-w.d)), "kl-swapped", "swapped"),
    wrong("absolute log-ratio", plus(ppo, lambda w: w.d.abs()), "kl-sign", "sign"),
    wrong("k1 cut at 0", plus(ppo, lambda w: w.d.clamp(min=0)), "kl-step", "step"),
    wrong("k2 subtracted", plus(ppo, lambda w: -k2(w)), "kl-away", "away"),
    wrong("ratio x k3 subtracted", plus(ppo, lambda w: -ratio_k3(w)), "kl-away", "away"),
    wrong("ratio x k3 subtracted, sequence mean", plus(ppo, lambda w: -ratio_k3(w), World.sequence), "kl-away", "away"),
    wrong("k3 differentiated and subtracted", plus(ppo, lambda w: -k3(w.d)), "kl-away", "away"),
    wrong("KL added to the advantage", lambda w: w.token(ppo(w, 9, 9, w.a + BETA * w.d.detach())), "kl-away", "away"),
    wrong("KL under no_grad", no_grad, "kl-detached kl-absent", "none"),
    wrong("KL of the detached policy", plus(ppo, lambda w: k3(w.d.detach())), "kl-detached kl-absent", "none"),
    wrong("KL forgotten", lambda w: (w.token(ppo(w)), {"kl_in": "loss"}), "kl-absent", "none"),
    wrong("policy loss reversed", plus(lambda w: ppo(w, a=-w.a), ratio_k3), "policy-reversed"),
    wrong("policy loss reversed, reinforce", plus(lambda w: w.a * w.logp, k2), "policy-reversed"),
    wrong("ratio upside down", plus(lambda w: -w.a / w.r, k2), "policy-reversed"),
    wrong("both reversed", lambda w: -w.token(ratio(w) + BETA * ratio_k3(w)), "policy-reversed kl-away"),
    wrong("ratio detached", plus(lambda w: ratio(w).detach(), ratio_k3), "policy-absent"),
    wrong("KL over all places", lambda w: w.token(ppo(w)) + BETA * (ratio_k3(w) * w.m).mean(), "beta-off"),
    wrong("KL over padding", lambda w: w.token(ppo(w)) + BETA * ratio_k3(w).mean(), "off-mask-gradient"),
    wrong("loss over padding", lambda w: (ppo(w) + BETA * ratio_k3(w)).mean(), "off-mask-gradient"),
    wrong("KL summed, token mean", lambda w: w.token(ppo(w)) + BETA * w.sums(ratio_k3(w)).mean(), "beta-off"),
    wrong("square without 1/2", plus(ppo, lambda w: w.d.square()), "beta-off"),
    wrong("beta squared", plus(ppo, lambda w: BETA * ratio_k3(w)), "beta-off"),
    wrong("reference late", plus(ppo, lambda w: (w.logp - w.ref.roll(1, 1)).square() / 2), "shift"),
    wrong("reference late, and passed so", lambda w: passed(w, w.ref.roll(1, 1)), "shift"),
    wrong("labels shifted twice", shifted_twice, "shift"),
    wrong("probabilities for the reference", lambda w: passed(w, w.ref.exp()), "not-log-probabilities"),
    wrong("policy / ref weighs k1", plus(ppo, lambda w: w.d.exp() * w.d), "kl-neither", "neither"),
    wrong("mask late", lambda w: ((ppo(w) + BETA * k2(w)) * late(w.m)).sum() / w.m.sum(), "off-mask-gradient"),
]
