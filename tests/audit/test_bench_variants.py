"""Hand-written losses, right and wrong, are named as they are; and so are advantages, with a KL in them or without.

The last 40 were written from the specification of `klamp.check` alone, after its thresholds were fixed.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import advantages, discounted, entropy, exact_kl, head_of, k2, k3, ppo, ratio_k3, score
from tests.audit.bench.worlds import BETA, Case, Score, World, made_cases, make_world, pick, three_worlds, wrong
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import klamp

Made = dict[str, tuple[Tensor, dict[str, Any]]]
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
        "plain token": {"reinforce, k2": w.token(-a * w.logp + BETA * k2(w))},
        "plain sequence": {"reinforce, k1 as a score": w.sequence(-a * w.logp + scored)},
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
    twice_loss = twice.token(-a * twice.logp + BETA * k2(twice))
    summed = sum(((x[m] - BETA * y[m]).sum() for x, y, m in zip(policy, d, w.mask, strict=True)), torch.zeros(()))

    def token(kl: Any, policy_loss: Any = policy) -> Any:
        return w.token(policy_loss + BETA * kl)

    return {
        ("kl-forward", "forward"): {
            "k3 differentiated": token(k3(d)),
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


def known(w: World, beta: float, *names: str, **more: Any) -> dict[str, Any]:
    """What the writer passed: of the old policy, the rewards and the logits only what is named."""
    extra = {"old": {"old_logprobs": w.old}, "rewards": {"rewards": w.rewards}, "logits": w.logits_passed()}
    given = w.passed() | {"beta": beta, "old_logprobs": None, "sampler_logprobs": None}
    for name in names:
        given |= extra[name]
    return given | more


def python_loop(w: World) -> Tensor:
    rows = []
    for i, row in enumerate(w.mask):
        each = []
        for t in range(int(row.sum())):
            ratio, q = torch.exp(w.logp[i, t] - w.logp[i, t].detach()), w.ref[i, t] - w.logp[i, t]
            each.append(-ratio * w.advantages[i] + 0.04 * ratio * (torch.exp(q) - q - 1))
        rows.append(torch.stack(each).mean())
    return torch.stack(rows).mean()


def held_out_sound(w: World) -> Made:
    k = partial(known, w)
    a, r, adv, sequence_ratio = w.a, w.r, w.advantages, w.each(w.log_r).exp()
    reinforce, held_k2, last = -a * w.logp, r.detach() * k2(w), w.places == w.m.sum(1, keepdim=True) - 1
    in_reward = (w.rewards - 0.05 * w.sums(w.d.detach())).view(-1, 4)
    rloo = (in_reward - (in_reward.sum(1, keepdim=True) - in_reward) / 3).reshape(-1)
    to_go = discounted(w, last * w.rewards[:, None] - 0.05 * w.d.detach()) * w.m
    to_go = (to_go - w.token(to_go)) * w.m
    gspo = -torch.min(sequence_ratio * adv, sequence_ratio.clamp(1 - 3e-2, 1 + 4e-2) * adv).mean()
    spo = -r * a + a.abs() / 0.4 * (r - 1).square()
    taper = torch.where(adv >= 0, 1.0, w.sums(w.log_r).detach().exp().clamp(0, 1))
    back = torch.where(r > 1.1, -0.3 * r + 1.3 * 1.1, torch.where(r < 0.9, -0.3 * r + 1.3 * 0.9, r))
    bounded = torch.minimum(w.log_r * a.sign(), (w.log_r * a.sign()).clamp(-0.4, 0.4)) * a.sign()
    s, t = ((x / 2).log_softmax(-1) for x in (w.logits, w.ref_logits))
    warm, topr = kl_div(t, s, log_target=True, reduction="none"), -(taper * adv * w.sums(w.logp)).sum()
    forward, shifted = ppo(w, r=w.live) + 0.08 * k3(w.d), ppo(w, 0.2, 0.28, a - 0.03 * (w.old - w.ref))
    in_rloo = k(0.05, "rewards", advantages=rloo, kl_in="reward", group_size=4)
    head, teacher = head_of(w, 8, whose=w.logits, tail=True)
    surprised = -w.live * a * (entropy(w) >= entropy(w)[w.mask].quantile(0.7))
    with_entropy = ppo(w, 0.2, 0.28) - 0.003 * entropy(w) + 0.04 * ratio_k3(w)
    return {
        "a Python loop": (python_loop(w), k(0.04)),
        "REINFORCE and k2, summed": ((reinforce + 0.1 * k2(w)).masked_fill(~w.mask, 0.0).sum() / len(w.mask), k(0.1)),
        "RLOO, the sequence's KL in the reward": (-(rloo * w.sums(w.logp)).mean(), in_rloo),
        "PPO, k1 of the rollout policy in the advantage": (w.token(shifted), k(0.03, "old", kl_in="advantage")),
        "reward-to-go": (-w.token(to_go * w.logp), k(0.05, "rewards", advantages=to_go, kl_in="reward")),
        "CISPO": (w.token(-a * score(w, r.clamp(max=1.3)) + 0.02 * held_k2), k(0.02, "old")),
        "GSPO": (gspo + 0.05 * w.sequence(ratio_k3(w)), k(0.05, "old")),
        "DR-GRPO, k3 meant forward": (w.sums(forward).sum() / (len(w.ids) * 64), k(0.08, means="forward")),
        "REINFORCE, exact KL": (w.token(reinforce + 0.05 * exact_kl(w)), k(0.05, "logits")),
        "SPO's quadratic loss": (w.token(spo + 0.05 * ratio_k3(w)), k(0.05, "old")),
        "TOPR's taper": (topr / w.m.sum() + 0.05 * w.token(r.detach() * score(w, w.d)), k(0.05, "old")),
        "PPO with rollback": (w.sequence(-torch.minimum(r * a, back * a) + 0.1 * held_k2), k(0.1, "old")),
        "AWR": (w.token(-(a / 1.5).exp().clamp(max=20) * w.logp + 0.05 * k2(w)), k(0.05)),
        "Kimi's squared residual": ((adv - 0.1 * w.sums(w.d)).square().mean() / 0.2, k(0.1)),
        "GMPO": (-(w.each(bounded).exp() * adv).mean() + 0.03 * w.sequence(ratio_k3(w)), k(0.03, "old")),
        "on-policy distillation": ((w.live * w.d.detach() * w.m).sum(), k(1.0, kl_in="advantage", advantages=0 * adv)),
        "logits, both temperatures 2": (4 * w.token(warm.sum(-1)), w.teacher_passed(temperature=2.0)),
        "a head with a bucket": (w.token((head.exp() * (head - teacher)).sum(-1)), w.teacher_passed()),
        "PPO, entropy bonus": (w.token(with_entropy), k(0.04, "old", "logits")),
        "top entropy quantile": (w.token(surprised + 0.05 * k2(w)), k(0.05)),
    }


def held_out_faulty(w: World) -> Made:
    """20 faulty losses, by the codes that name the fault."""
    k, a, adv, reinforce = partial(known, w), w.a, w.advantages, -w.a * w.logp
    lost = sum((adv[i] * w.logp[i, row].sum() for i, row in enumerate(w.mask)), torch.zeros(())) / w.m.sum()
    held = w.each(w.log_r).exp().detach()
    clipped = torch.min(held * adv, held.clamp(0.97, 1.04) * adv)
    trained, whole = w.mask & (w.places % 11 < 6), torch.ones_like(w.mask)
    twice = w.of(pick(w.logits, w.ids.roll(-1, 1)), ref=pick(w.ref_logits, w.ids.roll(-1, 1)))
    served = w.of(w.logp, ref=w.ref.exp())
    ids = w.ids.clamp(min=3).masked_fill(w.places == w.m.sum(1, keepdim=True) - 1, 2)
    on = w.of(pick(w.logits, ids), ref=pick(w.ref_logits, ids), mask=whole)
    low_var = (ppo(w, 0.2, 0.28, r=w.live) + 0.04 * k3(w.d.clamp(-20, 20)).clamp(-10, 10)) * w.m / w.m.sum()
    s, t = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    head, own, hot = head_of(w, 8), head_of(w, 8, whose=w.logits), (w.logits / 1.5).log_softmax(-1)
    own_s, own_t = (x.log_softmax(-1) for x in own)
    heated = (hot.exp() * (hot - t)).sum(-1)
    return {
        "policy-reversed": (lost + 0.05 * w.token(k2(w)), k(0.05)),
        "policy-absent": (-clipped.mean() + 0.05 * w.sequence(ratio_k3(w)), k(0.05, "old")),
        "kl-zero": (w.token(ppo(w) + 0.05 * w.r.detach() * w.d), k(0.05, "old")),
        "kl-away": (w.sequence(-w.live * (a - 0.06 * (w.ref - w.logp).detach())), k(0.06, kl_in="advantage")),
        "kl-swapped": (w.token(reinforce + 0.05 * k3(-w.d)), k(0.05)),
        "kl-sign": (w.sums(reinforce + 0.03 * (w.d.square() + 1e-12).sqrt()).mean(), k(0.03)),
        "kl-step": (w.token(ppo(w, 0.2, 0.3, r=w.live) + 0.05 * (torch.maximum(w.logp, w.ref) - w.ref)), k(0.05)),
        "kl-detached kl-absent": (w.sequence(reinforce) + 0.1 * w.sequence(k3(w.d)).item(), k(0.1, kl_in="loss")),
        "off-mask-gradient": (  # the KL over tool outputs too
            (reinforce * trained).sum() / trained.sum() + 0.05 * w.token(k2(w)),
            k(0.05, mask=trained),
        ),
        "beta-off": (w.token(reinforce) + 0.1 * (w.sums(k2(w)) / 64).mean(), k(0.1)),
        "shift": (twice.token(-a * twice.logp + 0.05 * k2(twice)), known(twice, 0.05, "logits")),
        "not-log-probabilities": (w.token(reinforce + 0.02 * k2(served)), known(served, 0.02)),
        "after-end-trained": (on.token(k2(on) / 20 - a * on.logp), known(on, 0.05, ids=ids, eos=2, pad=0)),
        "kl-forward": (low_var[:4].sum() + low_var[4:].sum(), k(0.04)),
        "kl-forward ": (cross_entropy(w.logits[w.mask], t[w.mask].exp()), w.teacher_passed()),
        "head-no-tail": (w.sequence((head[0].exp() * (head[0] - head[1])).sum(-1)), w.teacher_passed()),
        "head-renormalised": (w.token((own_s.exp() * (own_s - own_t)).sum(-1)), w.teacher_passed()),
        "temperature other-temperature": (2.25 * w.token(heated), w.teacher_passed(temperature=1.5)),
        "off-mask-gradient ": (  # batchmean over padding
            kl_div(t.flatten(0, 1), s.flatten(0, 1), log_target=True, reduction="batchmean"),
            w.teacher_passed(),
        ),
        "kl-absent": (-w.token(entropy(w)), w.teacher_passed()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [200, 201])
def test_held_out_losses_are_named(seed: int) -> None:
    world = make_world(seed, shape=(8, 20), lag=0.05)
    right = made_cases(held_out_sound(world), kl=(), beta=None)
    faults = [wrong(codes, lambda _, x=made: x, codes) for codes, made in held_out_faulty(world).items()]
    assert len(right) == len(faults) == 20
    Score((case, world) for case in right).demand(0.8)
    Score((case, world) for case in faults).demand(0.85)
