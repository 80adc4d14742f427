"""What anchors cost together, where a run ends that is held to them, and what a trust region cuts, in words."""

from __future__ import annotations

import math
from dataclasses import replace

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import describe_price
from klamp.config.loss import Price
from klamp.config.teacher import TeacherConfig
from klamp.verify.config_facts import NO_KL, bare_teacher, bare_term
from klamp.verify.convergence import BETA, REACHED, follow, teacher_price, worlds
from klamp.verify.mixes import COEF, expected_success, from_own_end
from klamp.verify.one_step import Scene
from klamp.verify.worlds import enumerate_outcomes

Lines = list[tuple[str, str]]
MOVING = ("ema", "periodic", "live")
"""Anchors that are made of the policy again and again."""
MOVES = "not known: a coefficient moves, or an anchor with the policy"
RATES = (0.04, 0.2, 0.5)
"""How often a teacher solves a prompt, where nobody says."""


def moves(kl: KLConfig) -> bool:
    """Whether the coefficient of a KL to the reference changes to the end, or the reference does."""
    return kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.reference in MOVING


def where_it_ends(kl: KLConfig, loss: LossConfig, teacher: TeacherConfig | None, who: str, *, rewarded: bool) -> str:
    """The fixed point of the expected update in the largest world of `klamp verify convergence`, held to `who`."""
    world, held = worlds()[-1] if rewarded else Scene(chain=worlds()[-1].chain), who != "teacher"
    taught = None if teacher is None else bare_teacher(teacher, COEF)
    end = follow(replace(bare_term(kl), beta=BETA) if held else NO_KL, loss, world, taught)
    coefficients = [f"beta {BETA:g}"] * held + [f"teacher_coef {COEF:g}"] * (teacher is not None)
    at = f"completions of up to {world.chain.length} tokens, all counted, {', '.join(coefficients)}"
    if not end.stands:
        return f"nowhere: {end.kl:.2g} nats from the {who.replace('ref', 'reference')} it is still moving ({at})"
    target = f"{who} exp(reward / price)"
    if not rewarded:
        return f"{'at' if end.exact else f'{end.distance:.2g} nats from'} the {who} ({at})"
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
    kl: KLConfig, loss: LossConfig, teacher: TeacherConfig, to_ref: Price | None, *, size: int, success: float | None
) -> Lines:
    """The price of a teacher, the mix with a reference and its toll, where the run ends, what success to expect.

    `to_ref` is the price of a nat away from a reference, if one holds the policy; `size` the completions per group, 0
    without a reward; `success` how often the teacher solves a prompt.
    """
    price, rewarded = teacher_price(teacher, loss, group_size=size or 2), size > 0
    beta, coef = 0.0 if to_ref is None else to_ref.per_completion, price.per_completion
    who, total = "teacher" if to_ref is None else "mix", beta + coef
    words = "none: without a reward a coefficient is only a share of the steps"
    if rewarded:
        words = f"to the teacher: {describe_price(price, group_size=size, name='teacher_coef')}"
    lines = [("price", words)]
    if to_ref is not None and (kl.kl_clip_method != "none" or kl.excludes):
        return lines
    if teacher.kind in MOVING or teacher.teacher_schedule != "constant" or (to_ref is not None and moves(kl)):
        return [*lines, ("ends", MOVES)]
    reverse = teacher.teacher_direction == "reverse" and (to_ref is None or kl.kl_gradient == "reverse")
    if to_ref is not None and reverse:
        scaled = " x the standard deviation of a group's rewards" if rewarded and price.scaled else ""
        mix = f"ref^{beta / total:.3g} teacher^{coef / total:.3g}"
        least = f"{toll(worlds()[-1], beta, coef):.2g} in a world of {worlds()[-1].chain.length} tokens"
        lines += [
            ("mix", f"{mix}, normalised: over whole completions a nat away from it costs {total:.3g}{scaled}"),
            ("toll", f"no policy pays less for both than -{total:.3g} log(sum of {mix}){scaled}: {least}"),
        ]
    lines.append(("ends", ends := where_it_ends(kl, loss, teacher, who, rewarded=rewarded)))
    if rewarded and reverse and not price.scaled:
        rates = RATES if success is None else (success,)
        found = (f"{rate:g} -> {expected_success(rate, total):.3g}" for rate in rates)
        away = "" if ends.startswith("at ") else "; this run ends elsewhere"
        text = f"how often the {who} solves a prompt (reward 0 or 1), and {who} exp(reward / {total:.3g}) does"
        lines.append(("success", f"{text}: {', '.join(found)}{away}"))
    return lines


def toll(world: Scene, to_ref: float, to_teacher: float) -> float:
    """What no policy avoids of to_ref KL(policy||ref) + to_teacher KL(policy||teacher): both at their mix."""
    y, total = enumerate_outcomes(world.chain, unreachable=True), to_ref + to_teacher
    mix = (to_ref * y.ref_logprobs + to_teacher * y.teacher_logprobs).sum(-1) / total
    return -total * float(mix.logsumexp(-1))


def sampler_end(kl: KLConfig, loss: LossConfig) -> str:
    """Where the reward leads, as a proximal term lets it, in a world of one token out of five."""
    ended = follow(replace(bare_term(kl), beta=BETA), loss, worlds()[0]).ended
    short = (ended.rewards.max() - (ended.outcomes.probs * ended.rewards).sum()).item()
    end = "at" if short < 1e-3 else f"{short:.2g} below"
    return f"as without this term: {end} the reward's maximum within the support of the start (one token out of five)"


def trust_region(loss: LossConfig) -> Lines:
    """What the policy loss follows under a trust region to the sampler; nothing without one."""
    region, parts = loss.trust, list[str]()
    if region.mode is not None:
        unit, how = region.mode.split("_")
        low, high = region.low or 0.0, math.inf if region.high is None else region.high
        whose = "each token" if unit == "token" else "the whole completion (a product over tokens)"
        cut = "dropped outside of it" if how == "mask" else "bounded by it: biased where that binds"
        parts.append(f"policy loss x old policy/sampler of {whose}, in [{low:g}, {high:g}], {cut}")
    if region.threshold is not None:
        over = f"whose mean log(sampler/policy) exceeds {region.threshold:g} nats per token"
        parts.append(f"completions of negative advantage {over} are dropped")
    return [("trust", "; ".join(parts))] if parts else []
