"""Where a run with several anchors ends: at the mix of reference and teacher, at the teacher, or at the reward's best.

With horizon `sequence` the optimum of E[reward] - beta KL(policy||ref) - coef KL(policy||teacher) is

    log policy = (reward + beta log ref + coef log teacher) / (beta + coef) + const

since the two KLs are (beta + coef) KL(policy||mix) and a toll, where the mix is the end without a reward. So beta +
coef is the price of a nat away from the mix, and the toll is paid by every policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.core.types import Horizon
from klamp.verify.convergence import BETA, LOSSES, REACHED, End, answer_convergence, follow, worlds
from klamp.verify.one_step import Scene
from klamp.verify.oracle import expected_gradient, gradient_of, reverse_kl
from klamp.verify.proofs.anchors import as_loss, constants, proximal, taught_by
from klamp.verify.proofs.check import Answer, Check, is_equal, is_true
from klamp.verify.worlds import one_position, prefix_probs, truncate_top_p

COEF = 0.3
"""Of the teachers whose end is shown."""
FIXED = LOSSES["fixed length"]
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss, k3; loss, k1": ({}, {}),
    "loss, exact; loss, a head of 1": ({"kl_estimator": "exact"}, {"estimator": "topk", "top_k": 1}),
    "loss, k3; advantage, k1": ({}, {"placement": "advantage"}),
    "reward, k1; reward, k1": ({"kl_estimator": "k1", "kl_placement": "reward"}, {"placement": "reward"}),
}
"""KLs to the reference and to the teacher, by what they are."""


def expected_success(rate: float, coefficient: float) -> float:
    """How often a run ends in success whose reward is 1 for it and 0 else, held to a teacher that succeeds so often.

    Equation: the odds are multiplied by exp(1 / coefficient), as the end is teacher * exp(reward / coefficient).

    Args:
        rate: how often the teacher alone succeeds, in [0, 1]; with a reference as well, how often their mix does.
        coefficient: the price of a nat away from it, in reward, above 0.
    """
    return rate / (rate + (1 - rate) * math.exp(-1 / coefficient)) if rate else 0.0


def follow_pair(name: str, horizon: Horizon, world: Scene) -> End:
    """Where two anchors of `PAIRS` end."""
    kl, teacher = PAIRS[name]
    taught = taught_by(coef=COEF, horizon=horizon, **teacher)
    return follow(KLConfig(beta=BETA, kl_horizon=horizon, **kl), FIXED, world, taught)


def answer_ends() -> Answer:
    """Which settings reach the optimum that they claim, with one anchor and with several?"""
    found = answer_convergence()
    words = (
        "Two anchors end at (reward + beta log ref + coef log teacher) / (beta + coef) over the sequence; per token "
        "each prefix has that with what its tokens go on to earn. A teacher alone ends at the teacher. A KL to the "
        "sampler slows an update, and ends where the run would end without it."
    )
    checks = (*found.checks, *_two_anchors(), *_one_anchor(), *_top_p())
    return replace(found, checks=checks, words=(*found.words, words))


def _ends_there(claim: str, end: End) -> Check:
    return is_true(claim, end.exact, f"{abs(end.distance):.0e} nats away", expected=f"below {REACHED:g}")


def _two_anchors() -> Iterator[Check]:
    one, three = worlds()[:2]
    for name, world in ((name, world) for name in PAIRS for world in (one, three)):
        claim = f"{name}; sequence, up to {world.chain.length} tokens: ends at the optimum of both"
        yield _ends_there(claim, follow_pair(name, "sequence", world))
    bare = follow_pair(next(iter(PAIRS)), "sequence", Scene(chain=three.chain))
    yield _ends_there("the same without a reward: at the mix", bare)
    for name in list(PAIRS)[:-1]:  # in the reward there is no horizon `token`
        end = follow_pair(name, "token", three)
        claim = f"{name}; token, up to 3 tokens: at an end of its own, {end.distance:.2g} nats from the optimum"
        off = from_own_end(end.ended) if end.stands and not end.exact else math.nan
        yield is_equal(claim, off, 0.0, tolerance=1e-6)


def from_own_end(world: Scene, beta: float = BETA) -> float:
    """How far a policy is from exp((Q + beta log ref + COEF log teacher) / (beta + COEF)) at its worst prefix, in nats.

    Q(s, y) is what completions earn that go on from s with y; less its mean it is the natural gradient of E[reward].
    """
    chain, y = world.chain, world.outcomes
    probs = chain.logprobs("policy").detach().exp()
    earned = gradient_of((y.policy_logprobs.sum(-1).exp() * world.rewards).sum(), chain)
    gained = earned / (prefix_probs(chain, "policy").detach()[:, None] * probs)
    wanted = (gained + beta * chain.logprobs("ref") + COEF * chain.logprobs("teacher")) / (beta + COEF)
    return (wanted.log_softmax(-1) - probs.log()).abs().max().item()


def _one_anchor() -> Iterator[Check]:
    one, three = worlds()[:2]
    for direction in ("reverse", "forward", "js"):
        taught = taught_by(direction=direction, estimator="topk", top_k=1)
        end = follow(KLConfig(beta=0.0), FIXED, Scene(chain=three.chain), taught)
        yield _ends_there(f"a teacher alone, {direction}, a head of 1: at the teacher", end)
    ended = follow(proximal(COEF), FIXED, one).ended
    earned = (ended.outcomes.probs * ended.rewards).sum()
    yield is_equal("the sampler alone: at the reward's maximum", earned, one.rewards.max(), tolerance=1e-3)
    start = replace(three, chain=replace(three.chain, teacher_logits=three.chain.ref_logits))
    end = follow(proximal(COEF), FIXED, start, taught_by(coef=BETA, horizon="sequence"))
    yield _ends_there("the sampler and the start: at start exp(reward / beta)", end)


def _top_p() -> Iterator[Check]:
    """Checks runs whose sampler keeps .9 of the policy: at the teacher on head and nucleus, or away from it."""
    policy, gap = (torch.randn(12, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    policy, other = 1.5 * policy, 1.5 * policy + gap
    teacher = taught_by(estimator="topk", top_k=2, off_policy="token")

    def run(logits: Tensor, constant: float) -> Tensor:
        for _ in range(100):
            chain = one_position(logits, logits, truncate_top_p(logits, 0.9), other)
            pull = expected_gradient(chain, lambda y: as_loss(teacher)(y) + constants(y, teacher, constant, constant))
            logits = (logits - 0.5 * pull[0] / logits.softmax(-1)).log_softmax(-1)
        return logits

    ended = run(policy, 0.0)
    seen, kl = truncate_top_p(ended, 0.9) > -torch.inf, reverse_kl(one_position(ended, other)).item()
    apart = (ended - other.log_softmax(-1))[seen].abs().max().item()
    yield is_equal("top-p .9, klamp's tail: ends at the teacher, on head and nucleus", apart, 0.0, tolerance=0.01)
    away = reverse_kl(one_position(run(other, 1.0), other)).item()
    claim = "top-p .9, delta + 1 in head and tail, from the teacher itself: leaves it"
    yield is_true(claim, away > 5 * kl, f"KL {away:.2g}; klamp's, from afar, {kl:.2g}", expected="5 times klamp's")
