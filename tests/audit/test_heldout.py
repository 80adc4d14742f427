"""40 losses that were written from the specification of `klamp.check` alone, after its thresholds were fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import discounted, entropy, exact_kl, head_of, k2, k3, ppo, ratio_k3, score
from tests.audit.bench.worlds import Case, Score, World, make_world, pick, wrong
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div


def known(w: World, beta: float, *names: str, **more: Any) -> dict[str, Any]:
    """What the writer passed: of the old policy, the rewards and the logits only what is named."""
    extra = {"old": {"old_logprobs": w.old}, "rewards": {"rewards": w.rewards}, "logits": w.logits_passed()}
    given = w.passed() | {"beta": beta, "old_logprobs": None, "sampler_logprobs": None}
    for name in names:
        given |= extra[name]
    return given | more


def token(beta: float, policy: Callable[[World], Tensor], kl: Callable[[World], Tensor], *names: str) -> Any:
    """One token mean."""
    return lambda w: (w.token(policy(w) + beta * kl(w)), known(w, beta, *names))


def sequence(beta: float, policy: Callable[[World], Tensor], kl: Callable[[World], Tensor], *names: str) -> Any:
    """One sequence mean."""
    return lambda w: (w.sequence(policy(w) + beta * kl(w)), known(w, beta, *names))


def reinforce(w: World) -> Tensor:
    return -w.a * w.logp


def live(w: World) -> Tensor:
    return -w.live * w.a


# sound


def python_loop(w: World) -> Any:
    total = torch.zeros(())
    for i, row in enumerate(w.mask):
        each = []
        for t in range(int(row.sum())):
            ratio, q = torch.exp(w.logp[i, t] - w.logp[i, t].detach()), w.ref[i, t] - w.logp[i, t]
            each.append(-ratio * w.advantages[i] + 0.04 * ratio * (torch.exp(q) - q - 1))
        total = total + torch.stack(each).mean()
    return total / len(w.mask), known(w, 0.04)


def summed(w: World) -> Any:
    loss = (reinforce(w) + 0.1 * k2(w)).masked_fill(~w.mask, 0.0).sum() / len(w.mask)
    return loss, known(w, 0.1)


def leave_one_out(w: World) -> Any:
    s = (w.rewards - 0.05 * w.sums(w.d.detach())).view(-1, 4)
    a = (s - (s.sum(1, keepdim=True) - s) / 3).reshape(-1)
    more = {"advantages": a, "kl_in": "reward", "group_size": 4}
    return -(a * w.sums(w.logp)).mean(), known(w, 0.05, "rewards", **more)


def old_k1_in_advantage(w: World) -> Any:
    return w.token(ppo(w, 0.2, 0.28, w.a - 0.03 * (w.old - w.ref))), known(w, 0.03, "old", kl_in="advantage")


def reward_to_go(w: World) -> Any:
    last = w.places == w.m.sum(1, keepdim=True) - 1
    to_go = discounted(w, last * w.rewards[:, None] - 0.05 * w.d.detach()) * w.m
    a = (to_go - w.token(to_go)) * w.m
    return -w.token(a * w.logp), known(w, 0.05, "rewards", advantages=a, kl_in="reward")


def gspo(w: World) -> Any:
    s, a = w.each(w.log_r).exp(), w.advantages
    policy = -torch.min(s * a, s.clamp(1 - 3e-2, 1 + 4e-2) * a).mean()
    return policy + 0.05 * w.sequence(ratio_k3(w)), known(w, 0.05, "old")


def fixed_length(w: World) -> Any:
    loss = w.sums(ppo(w, r=w.live) + 0.08 * k3(w.d)).sum() / (len(w.ids) * 64)
    return loss, known(w, 0.08, means="forward")


def quadratic(w: World) -> Tensor:
    return -w.r * w.a + w.a.abs() / 0.4 * (w.r - 1).square()


def tapered(w: World) -> Any:
    weight = torch.where(w.advantages >= 0, 1.0, w.sums(w.log_r).detach().exp().clamp(0, 1))
    policy = -(weight * w.advantages * w.sums(w.logp)).sum() / w.m.sum()
    return policy + 0.05 * w.token(w.r.detach() * score(w, w.d)), known(w, 0.05, "old")


def rollback(w: World) -> Tensor:
    low, high = -0.3 * w.r + 1.3 * 0.9, -0.3 * w.r + 1.3 * 1.1
    return -torch.minimum(w.r * w.a, w.a * torch.where(w.r > 1.1, high, torch.where(w.r < 0.9, low, w.r)))


def squared_residual(w: World) -> Any:
    return ((w.advantages - 0.1 * w.sums(w.d)) ** 2).mean() / 0.2, known(w, 0.1)


def geometric(w: World) -> Any:
    log_r = torch.minimum(w.log_r * w.a.sign(), (w.log_r * w.a.sign()).clamp(-0.4, 0.4)) * w.a.sign()
    policy = -(w.each(log_r).exp() * w.advantages).mean()
    return policy + 0.03 * w.sequence(ratio_k3(w)), known(w, 0.03, "old")


def distilled(w: World) -> Any:
    zero = torch.zeros_like(w.advantages)
    return (w.live * w.d.detach() * w.m).sum(), known(w, 1.0, kl_in="advantage", advantages=zero)


def tempered(w: World) -> Any:
    s, t = ((x / 2).log_softmax(-1) for x in (w.logits, w.ref_logits))
    return 4 * w.token(kl_div(t, s, log_target=True, reduction="none").sum(-1)), w.teacher_passed(temperature=2.0)


def head_and_tail(w: World) -> Any:
    s, t = head_of(w, 8, whose=w.logits, tail=True)
    return w.token((s.exp() * (s - t)).sum(-1)), w.teacher_passed()


def top_entropy(w: World) -> Tensor:
    return live(w) * (entropy(w) >= entropy(w)[w.mask].quantile(0.7))


SOUND: dict[str, Callable[[World], Any]] = {
    "GRPO in a Python loop, live ratio x k3": python_loop,
    "REINFORCE and k2, summed": summed,
    "RLOO, the sequence's KL in the reward": leave_one_out,
    "PPO, k1 of the rollout policy in the advantage": old_k1_in_advantage,
    "reward-to-go with a KL of each token": reward_to_go,
    "CISPO, detached ratio x k2": token(
        0.02, lambda w: -w.a * score(w, w.r.clamp(max=1.3)), lambda w: w.r.detach() * k2(w), "old"
    ),
    "GSPO, ratio x k3": gspo,
    "DR-GRPO's fixed length, k3, meant forward": fixed_length,
    "REINFORCE, exact KL": token(0.05, reinforce, exact_kl, "logits"),
    "SPO's quadratic loss": token(0.05, quadratic, ratio_k3, "old"),
    "TOPR's taper": tapered,
    "PPO with rollback": sequence(0.1, rollback, lambda w: w.r.detach() * k2(w), "old"),
    "AWR": token(0.05, lambda w: -(w.a / 1.5).exp().clamp(max=20) * w.logp, k2),
    "Kimi's squared residual": squared_residual,
    "GMPO": geometric,
    "on-policy distillation by importance sampling": distilled,
    "logits, both temperatures 2": tempered,
    "logits, the student's head with a bucket": head_and_tail,
    "PPO, entropy bonus": token(0.04, lambda w: ppo(w, 0.2, 0.28) - 0.003 * entropy(w), ratio_k3, "old", "logits"),
    "top entropy quantile": token(0.05, top_entropy, k2),
}


# faulty


def reversed_baseline(w: World) -> Any:
    a = w.rewards.view(-1, 4).mean(1).repeat_interleave(4) - w.rewards
    policy = -sum((a[i] * w.logp[i, row].sum() for i, row in enumerate(w.mask)), torch.zeros(())) / w.m.sum()
    return policy + 0.05 * w.token(k2(w)), known(w, 0.05, advantages=-a)


def detached_ratio(w: World) -> Any:
    s, a = w.each(w.log_r).exp().detach(), w.advantages
    policy = -torch.min(s * a, s.clamp(0.97, 1.04) * a).mean()
    return policy + 0.05 * w.sequence(ratio_k3(w)), known(w, 0.05, "old")


def sign_lost(w: World) -> Any:
    return w.sequence(-w.live * (w.a - 0.06 * (w.ref - w.logp).detach())), known(w, 0.06, kl_in="advantage")


def item_added(w: World) -> Any:
    return w.sequence(reinforce(w)) + 0.1 * w.sequence(k3(w.d)).item(), known(w, 0.1, kl_in="loss")


def over_tools(w: World) -> Any:
    trained = w.mask & (w.places % 11 < 6)
    loss = (reinforce(w) * trained).sum() / trained.sum() + 0.05 * w.token(k2(w))
    return loss, known(w, 0.05, mask=trained)


def of_max_length(w: World) -> Any:
    return w.token(reinforce(w)) + 0.1 * (w.sums(k2(w)) / 64).mean(), known(w, 0.1)


def labels_shifted_twice(w: World) -> Any:
    logp, ref = (pick(x, w.ids.roll(-1, 1)) for x in (w.logits, w.ref_logits))
    world = w.of(logp, ref=ref)
    return world.token(reinforce(world) + 0.05 * k2(world)), known(world, 0.05, "logits")


def server_probabilities(w: World) -> Any:
    world = w.of(w.logp, ref=w.ref.exp())
    return world.token(reinforce(world) + 0.02 * k2(world)), known(world, 0.02)


def after_the_end(w: World) -> Any:
    ids = w.ids.clamp(min=3).masked_fill(w.places == w.m.sum(1, keepdim=True) - 1, 2)
    world = w.of(pick(w.logits, ids), ref=pick(w.ref_logits, ids), mask=torch.ones_like(w.mask))
    return world.token(reinforce(world) + 0.05 * k2(world)), known(world, 0.05, ids=ids, eos=2, pad=0)


def low_var_kl(w: World) -> Any:
    q = (w.ref - w.logp).clamp(-20, 20)
    each = ppo(w, 0.2, 0.28, r=w.live) + 0.04 * (q.exp() - q - 1).clamp(-10, 10)
    halves = zip((each * w.m).chunk(2), w.m.chunk(2), strict=True)
    return sum((x.sum() / w.m.sum() for x, _ in halves), torch.zeros(())), known(w, 0.04)


def soft_targets(w: World) -> Any:
    return cross_entropy(w.logits[w.mask], w.ref_logits[w.mask].softmax(-1)), w.teacher_passed()


def no_tail(w: World) -> Any:
    s, t = head_of(w, 8)
    return w.sequence((s.exp() * (s - t)).sum(-1)), w.teacher_passed()


def renormalised(w: World) -> Any:
    s, t = (x.log_softmax(-1) for x in head_of(w, 8, whose=w.logits))
    return w.token((s.exp() * (s - t)).sum(-1)), w.teacher_passed()


def one_temperature(w: World) -> Any:
    s, t = (w.logits / 1.5).log_softmax(-1), w.ref_logits.log_softmax(-1)
    return 2.25 * w.token((s.exp() * (s - t)).sum(-1)), w.teacher_passed(temperature=1.5)


def batchmean(w: World) -> Any:
    s, t = (x.log_softmax(-1).flatten(0, 1) for x in (w.logits, w.ref_logits))
    return kl_div(t, s, log_target=True, reduction="batchmean"), w.teacher_passed()


FAULTY = [
    wrong("baseline minus reward", reversed_baseline, "policy-reversed"),
    wrong("GSPO's ratio detached", detached_ratio, "policy-absent"),
    wrong("detached ratio x k1", token(0.05, ppo, lambda w: w.r.detach() * w.d, "old"), "kl-zero"),
    wrong("a sign lost in the advantage", sign_lost, "kl-away"),
    wrong("log-ratio upside down", token(0.05, reinforce, lambda w: k3(-w.d)), "kl-swapped"),
    wrong("root of the square", token(0.03, reinforce, lambda w: (w.d.square() + 1e-12).sqrt()), "kl-sign"),
    wrong("maximum with the reference", token(0.05, live, lambda w: torch.maximum(w.logp, w.ref) - w.ref), "kl-step"),
    wrong(".item() added", item_added, "kl-detached kl-absent"),
    wrong("KL over tool outputs", over_tools, "off-mask-gradient"),
    wrong("KL over the maximal length", of_max_length, "beta-off"),
    wrong("labels shifted twice", labels_shifted_twice, "shift"),
    wrong("the server's probabilities", server_probabilities, "not-log-probabilities"),
    wrong("mask of max_new_tokens", after_the_end, "after-end-trained"),
    wrong("low_var_kl, two micro-batches", low_var_kl, "kl-forward"),
    wrong("soft targets", soft_targets, "kl-forward"),
    wrong("head without tail", no_tail, "head-no-tail"),
    wrong("head renormalised", renormalised, "head-renormalised"),
    wrong("temperature on one side", one_temperature, "temperature other-temperature"),
    wrong("batchmean over padding", batchmean, "off-mask-gradient"),
    wrong("the teacher's term forgotten", lambda w: (-w.token(entropy(w)), w.teacher_passed()), "kl-absent"),
]


@pytest.mark.slow
def test_no_sound_loss_is_accused_and_faults_are_named() -> None:
    sound = [Case(name, loss, kl=(), beta=None) for name, loss in SOUND.items()]
    worlds = [make_world(200 + i, shape=(8, 20), lag=0.05) for i in range(20)]
    assert len(sound) == len(FAULTY) == 20
    Score(zip(sound, worlds, strict=True)).demand(0.8)
    Score(zip(FAULTY, worlds, strict=True)).demand(0.85)
