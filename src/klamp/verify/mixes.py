"""Where a run ends that is held to a reference, a teacher, or a mix of both: in words, and as checks.

With horizon `sequence` the optimum of E[reward] - beta KL(policy||ref) - coef KL(policy||teacher) is

    log policy = (reward + beta log ref + coef log teacher) / (beta + coef) + const

since the two KLs are (beta + coef) KL(policy||mix) and a constant, where the mix is the end without a reward. So beta +
coef is the price of a nat away from the mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import describe_price
from klamp.config.loss import Price
from klamp.config.teacher import TeacherConfig
from klamp.core.types import Horizon
from klamp.verify.config_facts import NO_KL, bare_teacher, bare_term
from klamp.verify.convergence import BETA, LOSSES, REACHED, End, answer_convergence, follow, teacher_price, worlds
from klamp.verify.one_step import Scene
from klamp.verify.oracle import gradient_of
from klamp.verify.proofs.anchors import proximal, taught_by
from klamp.verify.proofs.check import Answer, Check, is_equal, is_true
from klamp.verify.worlds import prefix_probs

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
MOVING = ("ema", "periodic", "live")
"""Anchors that are made of the policy again and again."""


def where_it_ends(kl: KLConfig, loss: LossConfig, teacher: TeacherConfig | None, who: str, *, rewarded: bool) -> str:
    """The fixed point of the expected update in the largest world of `klamp verify convergence`, held to `who`."""
    held, moved = who != "teacher", teacher is not None and teacher.teacher_schedule != "constant"
    moved |= held and (kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.reference in MOVING)
    if moved or (teacher is not None and teacher.kind in MOVING):
        return "not known: a coefficient moves, or an anchor with the policy"
    world = worlds()[-1] if rewarded else Scene(chain=worlds()[-1].chain)
    taught = None if teacher is None else bare_teacher(teacher, COEF)
    end = follow(replace(bare_term(kl), beta=BETA) if held else NO_KL, loss, world, taught)
    coefficients = [f"beta {BETA:g}"] * held + [f"teacher_coef {COEF:g}"] * (teacher is not None)
    at = f"completions of up to {world.chain.length} tokens, all counted, {', '.join(coefficients)}"
    if not end.stands:
        return f"nowhere: {end.kl:.2g} nats from the {who.replace('ref', 'reference')} it is still moving ({at})"
    if not rewarded:
        return f"{'at' if end.exact else f'{end.distance:.2g} nats from'} the {who} ({at})"
    target = f"{who} exp(reward / price)"
    if end.exact:
        return f"at the optimum of E[reward] - price KL(policy||{who}): {target} ({at})"
    away = f"{end.distance:.2g} nats from the optimum {target}"
    if loss.scale == "std":
        away = f"{end.nearest:.2g} nats from the nearest optimum {target}, price {end.price:.2g}"
    elif teacher is not None and from_own_end(end.ended, BETA if held else 0.0) < REACHED:
        away += ", at that of each prefix given what its tokens go on to earn"
    against = f"KL {end.kl:.2f} against {end.optimal_kl:.2f}, length {end.length:.2f} against {end.optimal_length:.2f}"
    return f"{away}: {against} ({at})"


def teacher_lines(
    kl: KLConfig, loss: LossConfig, teacher: TeacherConfig, to_ref: Price | None, *, size: int
) -> list[tuple[str, str]]:
    """The price of a teacher, its mix with a reference, and where the run ends.

    `to_ref` is the price of a nat away from a reference, if one holds the policy; `size` the completions per group, 0
    without a reward.
    """
    price = teacher_price(teacher, loss, group_size=size or 2)
    words = "none: without a reward a coefficient is only a share of the steps"
    if size:
        words = f"to the teacher: {describe_price(price, group_size=size, name='teacher_coef')}"
    lines = [("price", words)]
    if to_ref is not None and (kl.kl_clip_method != "none" or kl.excludes):
        return lines
    if to_ref is not None and teacher.teacher_direction == "reverse" and kl.kl_gradient == "reverse":
        beta, coef = to_ref.per_completion, price.per_completion
        mix = f"ref^{beta / (beta + coef):.3g} teacher^{coef / (beta + coef):.3g}"
        scaled = " x the standard deviation of a group's rewards" if size and price.scaled else ""
        costs = f"over whole completions a nat away from it costs {beta + coef:.3g}{scaled}"
        lines.append(("mix", f"{mix}, normalised: {costs}"))
    who = "teacher" if to_ref is None else "mix"
    return [*lines, ("ends", where_it_ends(kl, loss, teacher, who, rewarded=size > 0))]


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
    checks = (*found.checks, *_two_anchors(), *_one_anchor())
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
