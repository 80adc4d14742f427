"""Hand-written losses, right and wrong, are named as they are; and so are advantages, with a KL in them or without."""

from itertools import product
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import advantages, discounted, entropy, exact_kl, k2, k3, ppo, ratio_k3, score
from tests.audit.bench.worlds import BETA, Case, Score, World, made_cases, make_world, pick, three_worlds, wrong
from torch.nn.functional import cross_entropy

import klamp

SLOW = pytest.mark.slow


def right(w: World) -> dict[str, dict[str, Any]]:
    """Sound losses, by the policy loss and the mean that a verdict may state."""
    a, r, rk3, scored = w.a, w.r, BETA * ratio_k3(w), BETA * score(w, w.d)
    sequence_ratio, heat = -a * w.each(w.log_r)[:, None].exp(), torch.where(a > 0, 1.0, 1.05)
    sapo = -a * torch.sigmoid(heat * (r - 1)) * 4 / heat
    of_old, mean = w.old - w.ref, w.token(w.old - w.ref)
    whole = w.sums(ppo(w) + rk3).sum() / (len(w.ids) * 64)
    truncated = ppo(w) * (w.old - w.sampler).exp().clamp(max=2)
    to_go = BETA * r * discounted(w, w.d).detach()
    penalty, off_policy = (klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=x) for x in (None, w.old))
    return {
        "ppo_clip token": {
            "k2": w.token(ppo(w) + BETA * k2(w)),
            "live ratio x k3": w.token(ppo(w) + BETA * w.live * k3(w.d)),
            "ratio x k3": w.token(ppo(w) + rk3),
            "k1 as a score": w.token(ppo(w) + scored),
            "ratio x k1 detached": w.token(ppo(w) + BETA * r * w.d.detach()),
            "detached ratio x k2": w.token(ppo(w) + BETA * r.detach() * k2(w)),
            "truncated sampler weight": w.token(truncated + rk3),
            "klamp.kl_penalty": w.token(ppo(w) + BETA * penalty),
            "klamp.kl_penalty, off-policy": w.token(ppo(w) + BETA * off_policy),
            "fixed length": whole,
            "boolean index": (ppo(w) + BETA * w.live * k3(w.d))[w.mask].mean(),
        },
        "ppo_clip sequence": {
            "k2": w.sequence(ppo(w) + BETA * k2(w)),
            "ratio x k3": w.sequence(ppo(w) + rk3),
            "filled": w.sequence(ppo(w)) + w.each(torch.where(w.mask, rk3, torch.zeros(()))).mean(),
        },
        "1 token": {"reinforce, k2": w.token(-a * w.logp + BETA * k2(w))},
        "1 sequence": {"reinforce, k1 as a score": w.sequence(-a * w.logp + scored)},
        " token": {
            "ratio, ratio x k3": w.token(-a * r + rk3),
            "cispo, k2": w.token(-a * score(w, r.clamp(max=1.28)) + BETA * k2(w)),
            "clip (0.3, 0.4), passed": (w.token(ppo(w, 0.3, 0.4) + rk3), {"clip": (0.3, 0.4)}),
            "KL in the advantage, in the loss": w.token(ppo(w, a=a - BETA * w.d.detach())),
            "KL in the advantage, baseline": (w.token(-r * (a - BETA * (of_old - mean))), {"baseline": mean}),
            "exact": (w.token(ppo(w) + BETA * exact_kl(w)), w.logits_passed()),
            "reward-to-go of k1": w.token(ppo(w, 9, 9) + to_go),
            "one of eight micro-batches": w.token(-a * r + rk3) / 8,
        },
        " sequence": {
            "sequence ratio, ratio x k3": w.sequence(sequence_ratio + rk3),
            "sapo, ratio x k3": w.sequence(sapo + rk3),
        },
    }


def faulty(w: World) -> dict[tuple[str, str], dict[str, Any]]:
    """Faulty losses, by the codes of which one names the fault and by their class, if it is not elsewhere."""
    a, r, d, policy, rk3 = w.a, w.r, w.d, ppo(w), BETA * ratio_k3(w)
    late = torch.cat([torch.zeros_like(w.m[:, :1]), w.m[:, :-1]], 1)
    shifted, served = w.of(w.logp, ref=w.ref.roll(1, 1)), w.of(w.logp, ref=w.ref.exp())
    hidden = {"old_logprobs": None, "sampler_logprobs": None}
    twice = w.of(pick(w.logits, w.ids.roll(-1, 1)), ref=pick(w.ref_logits, w.ids.roll(-1, 1)))
    to_teacher = cross_entropy(w.logits[w.mask], w.ref_logits.softmax(-1)[w.mask])
    twice_loss = twice.token(-a * twice.logp + BETA * k2(twice))
    summed = sum(((x[m] - BETA * y[m]).sum() for x, y, m in zip(policy, d, w.mask, strict=True)), torch.zeros(()))

    def token(kl: Any, policy_loss: Any = policy) -> Any:
        return w.token(policy_loss + BETA * kl)

    return {
        ("kl-forward", "forward"): {
            "k3 differentiated": token(k3(d)),
            "k3 within bounds": token(k3(d.clamp(-20, 20)).clamp(-10, 10)),
            "cross-entropy with the teacher": (to_teacher, w.teacher_passed()),
            "document 004": ((policy + BETA * ((w.ref - w.logp).exp() + d - 1)) * w.m).sum() / w.m.sum(),
        },
        ("kl-forward kl-swapped", "forward forward_or_swapped"): {"detached ratio x k3": token(r.detach() * k3(d))},
        ("kl-zero", "zero"): {"k1 differentiated": token(d), "detached ratio x k1": token(r.detach() * d)},
        ("kl-zero kl-away", "zero away"): {"k1, wrong sign": token(-d), "document 002, summed": summed},
        ("kl-swapped", "swapped"): {"k3 swapped": token(k3(-d)), "document 004's repair": token(d.exp() - d - 1)},
        ("kl-sign", "sign"): {"absolute log-ratio": token(d.abs())},
        ("kl-step", "step"): {"k1 cut at 0": token(d.clamp(min=0))},
        ("kl-away", "away"): {
            "ratio x k3 subtracted": w.token(policy - rk3),
            "KL added to the advantage": w.token(ppo(w, 9, 9, a + BETA * d.detach())),
        },
        ("kl-detached kl-absent", "none"): {
            "KL of the detached policy": token(k3(d.detach())),
            "KL forgotten": (w.token(policy), {"kl_in": "loss"}),
            "entropy beside a teacher": (-w.token(entropy(w)), w.teacher_passed()),
        },
        ("policy-reversed", ""): {"ratio upside down": token(k2(w), -a / r)},
        ("policy-absent", ""): {"ratio detached": w.token(-a * r.detach() + rk3)},
        ("beta-off", ""): {
            "KL over all places": w.token(policy) + (rk3 * w.m).mean(),
            "KL summed, token mean": w.token(policy) + w.sums(rk3).mean(),
            "square without 1/2": token(d.square()),
            "beta squared": w.token(policy + BETA * rk3),
        },
        ("off-mask-gradient", ""): {
            "KL over padding": w.token(policy) + rk3.mean(),
            "mask late": ((policy + BETA * k2(w)) * late).sum() / late.sum(),
        },
        ("shift", ""): {
            "reference late": token(k2(shifted)),
            "reference late, and passed so": (token(k2(shifted)), {"ref_logprobs": shifted.ref}),
            "labels shifted twice": (twice_loss, {**twice.passed(), **hidden, **w.logits_passed()}),
        },
        ("not-log-probabilities", ""): {"probabilities": (token(k2(served)), {"ref_logprobs": served.ref})},
        ("kl-neither", "neither"): {"policy / ref weighs k1": token(d.exp() * d)},
    }


def in_reward(w: World) -> Any:
    """Document 003: exp(d) d is taken from the reward; no ratio. What the advantages hold cannot be told."""
    d = w.d.detach()
    rewards = w.rewards - BETA * w.sums(d.exp() * d)
    a = rewards - rewards.mean()
    return w.token(-a[:, None] * w.logp), {"advantages": a, "rewards": w.rewards}


def score_of(w: World) -> Score:
    cases = [Case("document 003, in the reward", in_reward, kl=(), ok=None, beta=None)]
    for stated, losses in right(w).items():
        surrogate, mean = stated.split(" ")
        cases += made_cases(losses, surrogate=surrogate, mean=mean)
    for (codes, kl), losses in faulty(w).items():
        cases += [wrong(name, lambda _, x=loss: x, codes, kl) for name, loss in losses.items()]
    return Score(product(cases, [w]))


@pytest.mark.parametrize("watched", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_right_and_wrong_variants_are_named(number: int, watched: bool) -> None:
    world = three_worlds()[number]
    score = score_of(world.watch() if watched else world)
    assert len(score.rows) >= 55
    score.demand(0.95 if watched else 0.98)


@pytest.mark.parametrize("seed", [50, pytest.param(51, marks=SLOW), pytest.param(52, marks=SLOW)])
def test_forms_of_advantages_are_named(seed: int) -> None:
    score = Score(product(advantages(), [make_world(seed, shape=(16, 12))]))
    assert len(score.rows) == 24
    score.demand(0.95)
