"""Sound losses that people train with and that no short list of candidates holds: none of them may be accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from tests.audit.bench import advantages
from tests.audit.bench.losses import Tokens, discounted, entropy, exact_kl, head_of, k3, plus, ppo, ratio_k3, score
from tests.audit.bench.worlds import BETA, Case, World, pick
from torch import Tensor
from torch.nn.functional import huber_loss

import klamp
from klamp.core.trust import TrustRegion
from klamp.core.types import Reduction


def whole(w: World) -> Tensor:
    """The mean log-ratio to the old policy of each completion, [B, 1]."""
    return w.each(w.log_r)[:, None]


def geometric(w: World) -> Tensor:
    clipped = w.a.sign() * torch.minimum(w.a.sign() * w.log_r, w.a.sign() * w.log_r.clamp(-0.4, 0.4))
    return -w.a * w.each(clipped)[:, None].exp().expand_as(w.logp)


def total_variation(w: World) -> Tensor:
    gap = (w.logp.exp() - w.sampler.exp()).detach()
    return -w.a * w.r * ~(((w.a > 0) & (gap > 0.05)) | ((w.a < 0) & (gap < -0.05)))


def trust_mask(w: World) -> Tensor:
    log_p, log_mu = w.logits.log_softmax(-1), w.old_logits.log_softmax(-1)
    kl = ((log_mu.exp() * (log_mu - log_p)).sum(-1).detach() * w.m).amax(1, keepdim=True)
    return -w.a * w.r * (kl <= kl.median())


def covariance(w: World) -> Tensor:
    moved = ((w.logp - w.token(w.logp)) * (w.a - w.token(w.a.expand_as(w.logp)))).detach() * w.m
    return torch.where(moved < moved.flatten().quantile(0.9), -w.a * w.r, (-w.a * w.r).detach())


def squared(w: World) -> Tensor:
    return ((w.a - 0.5 * w.sums(w.log_r)[:, None]).square() / 2).expand_as(w.logp)


POLICIES: dict[str, Tokens] = {
    "ppo, dual clip": lambda w: torch.where(w.a < 0, torch.minimum(ppo(w), -1.5 * w.a), ppo(w)),
    "ppo, clip-higher nobody passed": lambda w: ppo(w, 0.17, 0.37),
    "geometric mean of clipped ratios": geometric,
    "sequence ratio, clipped at 3e-3": lambda w: ppo(w, 3e-2, 4e-2, r=whole(w).exp()).expand_as(w.logp),
    "sequence product of ratios, cut at 2": lambda w: -w.a * score(w, w.sums(w.log_r)[:, None].exp().clamp(max=2)),
    "cispo with a lower bound": lambda w: -w.a * score(w, w.r.clamp(0.9, 1.13)),
    "tapered: negatives cut at ratio 1": lambda w: -w.a * score(w, torch.where(w.a > 0, 1, w.r.clamp(max=1))),
    "ratio flipped for positives": lambda w: -w.a * score(w, torch.where(w.a > 0, 1 / w.r, w.r).clamp(max=3)),
    "advantage-weighted regression": lambda w: -score(w, (w.a / 1.3).exp()),
    "positives only": lambda w: -w.a.clamp(min=0) * w.r,
    "positives at a tenth": lambda w: -torch.where(w.a > 0, 0.1 * w.a, w.a) * w.r,
    "squared regret of a completion": squared,
    "soft clip by tanh": lambda w: -w.a * (1 + 0.2 * torch.tanh((w.r - 1) / 0.2)),
    "sigmoid gate with a temperature": lambda w: -w.a * torch.sigmoid(3.3 * (w.r - 1)) * 4 / 3.3,
    "no clip, total-variation mask": total_variation,
    "icepop": lambda w: -w.a * w.r * ((w.logp - w.sampler).detach().abs() < 0.17),
    "completions beyond a trust region masked": trust_mask,
    "clip-cov": covariance,
    "top entropy quantile": lambda w: ppo(w) * (entropy(w) >= entropy(w)[w.mask].quantile(0.8)),
    "advantage shaped by entropy": lambda w: ppo(w, a=w.a + torch.minimum(0.4 * entropy(w).detach(), w.a.abs() / 2)),
    "discounted towards the start": lambda w: ppo(w, a=w.a * 0.97**w.places),
    "truncated sampler weight at 1.01": lambda w: ppo(w) * (w.old - w.sampler).exp().clamp(max=1.01),
    "unlikelihood for negatives": lambda w: torch.where(w.a > 0, -w.a * w.logp, w.a * torch.log1p(-w.logp.exp())),
    "p-norm ratio": lambda w: -w.a * w.r.pow(0.5) / 0.5,
}
"""Policy losses, each beside the right KL under one token mean."""


def sampled_tail(w: World) -> Tensor:
    head = w.logits.detach().topk(4).indices
    log_p, log_q = head_of(w, whose=w.logits)
    return klamp.topk_kl(log_p, log_q, w.logp, w.ref.detach(), ~(head == w.ids[..., None]).any(-1))


def jensen_shannon(w: World) -> Tensor:
    log_p, log_q = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    return (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2


def moving_average(w: World) -> Tensor:
    """k3 to a policy that nobody passes."""
    return w.r * k3(w.logp - pick(0.5 * w.old_logits + 0.5 * w.ref_logits.roll(1, -1), w.ids).detach())


KLS: dict[str, Tokens] = {
    "annealed by place": lambda w: 0.9**w.places * ratio_k3(w),
    "on tokens of low entropy": lambda w: ratio_k3(w) * (entropy(w) < entropy(w)[w.mask].median()),
    "on completions with negative advantage": lambda w: ratio_k3(w) * (w.a < 0),
    "with a beta of each prompt": lambda w: ratio_k3(w) * (1 + torch.arange(len(w.ids)) // w.group)[:, None],
    "weighted by the share of surprise": lambda w: ratio_k3(w) * (w.ref.detach() / w.token(w.ref.detach())),
    "to a mixture": lambda w: w.r * k3(w.logp - torch.logaddexp(w.ref - 0.36, w.old - 1.2)),
    "to the reference and to a moving average": lambda w: ratio_k3(w) + moving_average(w),
    "to the reference, and k2 to the old policy": lambda w: ratio_k3(w) + 0.4 * w.log_r.square(),
    "exact, beside the log-probabilities": exact_kl,
    "exact, half of it sampled": lambda w: 0.5 * exact_kl(w) + 0.5 * ratio_k3(w),
    "a head and its sampled tail": sampled_tail,
    "Jensen-Shannon, exact": jensen_shannon,
    "Huber of the log-ratio": lambda w: huber_loss(w.d, torch.zeros_like(w.d), reduction="none", delta=0.2),
    "soft-bounded log-ratio": lambda w: w.live * (0.5 * torch.tanh(w.d / 0.5)).detach(),
    "straight-through bound": lambda w: w.logp * w.d.detach().clamp(-0.25, 0.25),
    "k1 with an exact baseline": lambda w: score(w, w.r * (w.d - exact_kl(w))),
    "k1 with the mean of the batch as baseline": lambda w: score(w, w.d - w.token(w.d)),
    "k1 with the mean of the completion's others": lambda w: score(w, w.d - (w.sums(w.d)[:, None] - w.d) / w.m.sum()),
    "whole-sequence k1, centred": lambda w: score(w, (w.sums(w.d) - w.sums(w.d).mean())[:, None].expand_as(w.d)),
    "future sums, discounted": lambda w: score(w, discounted(w, w.d, 0.9)),
    "Renyi, order 1/2, per token": lambda w: score(w, 2 * (1 - (-w.d / 2).exp())),
    "weighted by min(ratio, 1.05)": lambda w: score(w, w.r.clamp(max=1.05) * w.d),
    "weighted by policy / sampler": lambda w: score(w, (w.logp - w.sampler).exp() * w.d),
    "squared, of probabilities": lambda w: (w.logp.exp() - w.ref.exp()).square(),
    "k2 of the mean log-ratio": lambda w: w.each(w.d)[:, None].square().expand_as(w.d) / 2,
}
"""KLs, each beside PPO's loss under one token mean."""


def of_prompts(w: World, x: Tensor) -> Tensor:
    sums, counts = (y.reshape(-1, w.group).sum(1) for y in (w.sums(x), w.m.sum(1)))
    return (sums / counts).mean()


def of_halves(w: World, x: Tensor) -> Tensor:
    halves = zip((x * w.m).chunk(2), w.m.chunk(2), strict=True)
    return torch.stack([total.sum() / m.sum() for total, m in halves]).mean()


MEANS: dict[str, Callable[[World, Tensor], Tensor]] = {
    "mean of each prompt's token mean": of_prompts,
    "mean of two micro-batch means": of_halves,
    "lengths to the power -1/2": lambda w, x: (w.sums(x) / w.m.sum(1).sqrt()).mean(),
    "lengths to the power -2": lambda w, x: (w.sums(x) / w.m.sum(1).pow(2)).mean(),
    "logarithm of lengths": lambda w, x: (w.sums(x) / w.m.sum(1).log1p()).mean(),
    "sum": lambda w, x: (x * w.m).sum(),
    "weight of each completion": lambda w, x: (w.each(x) * (1 + w.rewards)).mean(),
    "weight of each place": lambda w, x: w.token(x / (1 + w.places).sqrt()),
    "a quarter of an accumulation window": lambda w, x: (x * w.m).sum() / 1234,
}
"""What the sum of policy loss and KL is reduced by."""


def beside(w: World) -> Tensor:
    """PPO's loss and the right KL."""
    return ppo(w) + BETA * ratio_k3(w)


def values(w: World, logits: Tensor) -> Tensor:
    """The loss of a value head on these logits."""
    return (logits @ torch.linspace(-1, 1, logits.shape[-1]).to(logits) - w.rewards[:, None]).square()


def second_teacher(w: World) -> Tensor:
    return w.token(beside(w) + 0.5 * w.r * k3(w.logp - pick(w.ref_logits.roll(1, 0), w.ids).detach()))


ALONE = {"advantages": None}
WHOLE: dict[str, Callable[[World], Any]] = {
    "entropy bonus from the logits": lambda w: w.token(beside(w) - 0.01 * entropy(w)),
    "entropy bonus from the sample": lambda w: w.token(beside(w) + 0.01 * w.live * w.logp.detach()),
    "entropy bonus, -p log p of the sample": lambda w: w.token(beside(w) + 0.01 * w.logp.exp() * w.logp),
    "value head on the trunk": lambda w: w.token(beside(w) + 0.1 * values(w, w.logits)),
    "two anchors": second_teacher,
    "self-imitation beside it": lambda w: w.token(beside(w) - 0.1 * w.logp * (w.a == w.a.amax())),
    "two means": lambda w: w.sequence(ppo(w)) + BETA * w.token(ratio_k3(w)),
    "router loss beside it": lambda w: w.token(beside(w)) + 1e-3 * w.logits.square().mean(),
    "length penalty in the loss": lambda w: w.token(beside(w) + 1e-3 * score(w, w.m.sum(1)[:, None])),
    "distillation alone": lambda w: (BETA * w.token(ratio_k3(w)), ALONE),
    "distillation alone, exact": lambda w: (BETA * w.token(exact_kl(w)), ALONE),
    "teacher's log-ratio as the advantage": lambda w: (w.token(-(w.ref - w.logp).detach() * w.r), ALONE),
    "forward KL that was meant": lambda w: (w.token(ppo(w) + BETA * w.r.detach() * k3(w.d)), {"means": "forward"}),
    "a pretraining batch beside it": lambda w: w.token(beside(w)) - 0.1 * pick(w.logits, w.ids.roll(1, 1)).mean(),
    "cross-entropy": lambda w: (-w.token(w.logp), dict.fromkeys(("ref_logprobs", "advantages", "beta"))),
}


def own_loss(surrogate: Any, reduction: Reduction, **term: Any) -> Callable[[World], Any]:
    """klamp's loss under one configuration."""

    def loss(w: World) -> Any:
        exact = term.get("value") in ("exact", "topk")
        given = {"policy_logprobs": w.logp, "mask": w.mask, "advantages": w.advantages, "old_logprobs": w.old}
        given |= {"ref_logprobs": w.ref, "sampler_logprobs": w.sampler, "exact_kl": exact_kl(w) if exact else None}
        trust = TrustRegion(**term.get("trust", {}))
        kl = klamp.KLTerm(**{name: x for name, x in term.items() if name != "trust"})
        chosen: dict[str, Any] = {"surrogate": surrogate, "reduction": reduction, "max_length": 50, "trust": trust}
        objective = klamp.Objective(clip_low=0.2, clip_high=0.28, beta=BETA, kl=kl, **chosen)
        batch = klamp.Batch(group_size=w.group, reference_length=10.0, **given)
        return klamp.grpo_loss(batch, objective).loss, {"clip": (0.2, 0.28), **(w.logits_passed() if exact else {})}

    return loss


TERMS: list[dict[str, Any]] = [
    {"value": "k3", "gradient": "reverse"},
    {"value": "k2", "gradient": "own"},
    {"value": "k1", "horizon": "sequence"},
    {"off_policy": "token", "max_weight": 1.1},
    {"off_policy": "sequence"},
    {"max_log_ratio": 0.2},
    {"placement": "advantage"},
    {"clip_method": "hard", "clip_threshold": 0.005},
    {"clip_method": "soft", "clip_threshold": 0.05, "clip_temperature": 0.3},
    {"value": "exact"},
    {"value": "topk"},
    {"normalizer": "sequence_mean"},
    {"trust": {"mode": "token_truncate", "high": 1.02}},
    {"trust": {"mode": "sequence_mask", "low": 0.9, "high": 1.2}},
]


def own_penalty(old: bool, **choice: Any) -> Tokens:
    return lambda w: klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=w.old if old else None, **choice)


def own_losses() -> Iterator[Case]:
    """klamp's losses and penalties; surrogates and reductions in turn."""
    reductions: tuple[Reduction, ...] = ("token_mean", "sequence_mean", "fixed_length")
    for i, term in enumerate(TERMS):
        surrogate, reduction = ("ppo_clip", "cispo", "score_function")[i % 3], reductions[i // 3 % 3]
        yield Case(f"klamp, {surrogate}, {reduction}, {term}", own_loss(surrogate, reduction, **term), beta=None)
    for old, horizon, value in product((False, True), ("token", "sequence"), ("k1", "k3")):
        penalty = own_penalty(old, horizon=horizon, value=value)
        yield Case(f"klamp.kl_penalty, {old}, {horizon}, {value}", plus(ppo, penalty), beta=None)


PARTS: dict[str, list[Case]] = {
    "policies": [Case(name, plus(x, ratio_k3), beta=None) for name, x in POLICIES.items()],
    "kls": [Case(f"KL {name}", plus(ppo, x), beta=None) for name, x in KLS.items()],
    "means": [Case(name, lambda w, f=mean: f(w, beside(w)), beta=None) for name, mean in MEANS.items()],
    "whole": [Case(name, loss, beta=None, kl=()) for name, loss in WHOLE.items()],
    "advantages": [*advantages.without_rewards()],
    "klamp": [*own_losses()],
}
