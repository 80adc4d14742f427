"""40 losses that were written from the specification of `klamp.check` alone, after its thresholds were fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.audit.bench.losses import discounted, entropy, exact_kl, head_of, k2, k3, ppo, ratio_k3, score
from tests.audit.bench.worlds import Score, World, made_cases, make_world, pick, wrong
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

Made = dict[str, tuple[Tensor, dict[str, Any]]]


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


def sound(w: World) -> Made:
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
    head, teacher = head_of(w, 8, whose=w.logits, tail=True)
    surprised = -w.live * a * (entropy(w) >= entropy(w)[w.mask].quantile(0.7))
    with_entropy = ppo(w, 0.2, 0.28) - 0.003 * entropy(w) + 0.04 * ratio_k3(w)
    return {
        "a Python loop": (python_loop(w), known(w, 0.04)),
        "REINFORCE and k2, summed": (
            (reinforce + 0.1 * k2(w)).masked_fill(~w.mask, 0.0).sum() / len(w.mask),
            known(w, 0.1),
        ),
        "RLOO, the sequence's KL in the reward": (
            -(rloo * w.sums(w.logp)).mean(),
            known(w, 0.05, "rewards", advantages=rloo, kl_in="reward", group_size=4),
        ),
        "PPO, k1 of the rollout policy in the advantage": (
            w.token(ppo(w, 0.2, 0.28, a - 0.03 * (w.old - w.ref))),
            known(w, 0.03, "old", kl_in="advantage"),
        ),
        "reward-to-go": (-w.token(to_go * w.logp), known(w, 0.05, "rewards", advantages=to_go, kl_in="reward")),
        "CISPO": (w.token(-a * score(w, r.clamp(max=1.3)) + 0.02 * held_k2), known(w, 0.02, "old")),
        "GSPO": (gspo + 0.05 * w.sequence(ratio_k3(w)), known(w, 0.05, "old")),
        "DR-GRPO, k3 meant forward": (
            w.sums(ppo(w, r=w.live) + 0.08 * k3(w.d)).sum() / (len(w.ids) * 64),
            known(w, 0.08, means="forward"),
        ),
        "REINFORCE, exact KL": (w.token(reinforce + 0.05 * exact_kl(w)), known(w, 0.05, "logits")),
        "SPO's quadratic loss": (w.token(spo + 0.05 * ratio_k3(w)), known(w, 0.05, "old")),
        "TOPR's taper": (
            -(taper * adv * w.sums(w.logp)).sum() / w.m.sum() + 0.05 * w.token(r.detach() * score(w, w.d)),
            known(w, 0.05, "old"),
        ),
        "PPO with rollback": (w.sequence(-torch.minimum(r * a, back * a) + 0.1 * held_k2), known(w, 0.1, "old")),
        "AWR": (w.token(-(a / 1.5).exp().clamp(max=20) * w.logp + 0.05 * k2(w)), known(w, 0.05)),
        "Kimi's squared residual": ((adv - 0.1 * w.sums(w.d)).square().mean() / 0.2, known(w, 0.1)),
        "GMPO": (-(w.each(bounded).exp() * adv).mean() + 0.03 * w.sequence(ratio_k3(w)), known(w, 0.03, "old")),
        "on-policy distillation": (
            (w.live * w.d.detach() * w.m).sum(),
            known(w, 1.0, kl_in="advantage", advantages=0 * adv),
        ),
        "logits, both temperatures 2": (
            4 * w.token(kl_div(t, s, log_target=True, reduction="none").sum(-1)),
            w.teacher_passed(temperature=2.0),
        ),
        "a head with a bucket": (w.token((head.exp() * (head - teacher)).sum(-1)), w.teacher_passed()),
        "PPO, entropy bonus": (w.token(with_entropy), known(w, 0.04, "old", "logits")),
        "top entropy quantile": (w.token(surprised + 0.05 * k2(w)), known(w, 0.05)),
    }


def faulty(w: World) -> Made:
    """20 faulty losses, by the codes that name the fault."""
    a, adv, reinforce = w.a, w.advantages, -w.a * w.logp
    lost = sum((adv[i] * w.logp[i, row].sum() for i, row in enumerate(w.mask)), torch.zeros(())) / w.m.sum()
    held = w.each(w.log_r).exp().detach()
    trained, whole = w.mask & (w.places % 11 < 6), torch.ones_like(w.mask)
    twice = w.of(pick(w.logits, w.ids.roll(-1, 1)), ref=pick(w.ref_logits, w.ids.roll(-1, 1)))
    served = w.of(w.logp, ref=w.ref.exp())
    ids = w.ids.clamp(min=3).masked_fill(w.places == w.m.sum(1, keepdim=True) - 1, 2)
    on = w.of(pick(w.logits, ids), ref=pick(w.ref_logits, ids), mask=whole)
    low_var = (ppo(w, 0.2, 0.28, r=w.live) + 0.04 * k3(w.d.clamp(-20, 20)).clamp(-10, 10)) * w.m / w.m.sum()
    s, t = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    head, own, hot = head_of(w, 8), head_of(w, 8, whose=w.logits), (w.logits / 1.5).log_softmax(-1)
    own_s, own_t = (x.log_softmax(-1) for x in own)
    return {
        "policy-reversed": (lost + 0.05 * w.token(k2(w)), known(w, 0.05)),
        "policy-absent": (
            -torch.min(held * adv, held.clamp(0.97, 1.04) * adv).mean() + 0.05 * w.sequence(ratio_k3(w)),
            known(w, 0.05, "old"),
        ),
        "kl-zero": (w.token(ppo(w) + 0.05 * w.r.detach() * w.d), known(w, 0.05, "old")),
        "kl-away": (w.sequence(-w.live * (a - 0.06 * (w.ref - w.logp).detach())), known(w, 0.06, kl_in="advantage")),
        "kl-swapped": (w.token(reinforce + 0.05 * k3(-w.d)), known(w, 0.05)),
        "kl-sign": (w.sums(reinforce + 0.03 * (w.d.square() + 1e-12).sqrt()).mean(), known(w, 0.03)),
        "kl-step": (
            w.token(ppo(w, 0.2, 0.3, r=w.live) + 0.05 * (torch.maximum(w.logp, w.ref) - w.ref)),
            known(w, 0.05),
        ),
        "kl-detached kl-absent": (
            w.sequence(reinforce) + 0.1 * w.sequence(k3(w.d)).item(),
            known(w, 0.1, kl_in="loss"),
        ),
        "off-mask-gradient": (  # the KL over tool outputs too
            (reinforce * trained).sum() / trained.sum() + 0.05 * w.token(k2(w)),
            known(w, 0.05, mask=trained),
        ),
        "beta-off": (w.token(reinforce) + 0.1 * (w.sums(k2(w)) / 64).mean(), known(w, 0.1)),
        "shift": (twice.token(-a * twice.logp + 0.05 * k2(twice)), known(twice, 0.05, "logits")),
        "not-log-probabilities": (w.token(reinforce + 0.02 * k2(served)), known(served, 0.02)),
        "after-end-trained": (
            on.token(-a * on.logp + 0.05 * k2(on)),
            known(on, 0.05, ids=ids, eos=2, pad=0),
        ),
        "kl-forward": (low_var[:4].sum() + low_var[4:].sum(), known(w, 0.04)),
        "kl-forward ": (cross_entropy(w.logits[w.mask], t[w.mask].exp()), w.teacher_passed()),
        "head-no-tail": (w.sequence((head[0].exp() * (head[0] - head[1])).sum(-1)), w.teacher_passed()),
        "head-renormalised": (w.token((own_s.exp() * (own_s - own_t)).sum(-1)), w.teacher_passed()),
        "temperature other-temperature": (
            2.25 * w.token((hot.exp() * (hot - t)).sum(-1)),
            w.teacher_passed(temperature=1.5),
        ),
        "off-mask-gradient ": (  # batchmean over padding
            kl_div(t.flatten(0, 1), s.flatten(0, 1), log_target=True, reduction="batchmean"),
            w.teacher_passed(),
        ),
        "kl-absent": (-w.token(entropy(w)), w.teacher_passed()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [200, 201])
def test_no_sound_loss_is_accused_and_faults_are_named(seed: int) -> None:
    world = make_world(seed, shape=(8, 20), lag=0.05)
    right = made_cases(sound(world), kl=(), beta=None)
    faults = [wrong(codes, lambda _, x=made: x, codes) for codes, made in faulty(world).items()]
    assert len(right) == len(faults) == 20
    Score((case, world) for case in right).demand(0.8)
    Score((case, world) for case in faults).demand(0.85)
