"""Sound losses that people train with and that no short list of candidates holds: none of them may be accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from tests.audit.bench.worlds import BETA, Case, World, pick
from torch import Tensor
from torch.nn.functional import huber_loss

import klamp
from klamp.core.trust import TrustRegion
from klamp.core.types import Reduction

Tokens = Callable[[World], Tensor]


def ppo(w: World, low: float = 0.2, high: float = 0.2, a: Tensor | None = None, r: Tensor | None = None) -> Tensor:
    """PPO's clipped loss of each token."""
    a, r = w.a if a is None else a, w.r if r is None else r
    return torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d."""
    return torch.expm1(-d) + d


def right_kl(w: World) -> Tensor:
    """The ratio times k3, both differentiated: the reverse KL for tokens of the old policy."""
    return w.r * k3(w.d)


def whole(w: World) -> Tensor:
    """The mean log-ratio to the old policy of each completion, [B, 1]."""
    return w.each(w.log_r)[:, None]


def entropy(w: World) -> Tensor:
    """The exact entropy at each place."""
    log_p = w.logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def exact_kl(w: World) -> Tensor:
    """The exact KL(policy||ref) at each place."""
    log_p, log_q = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def score(w: World, weight: Tensor) -> Tensor:
    """A detached weight times the log-probability."""
    return weight.detach() * w.logp


# policy losses


def geometric(w: World) -> Tensor:
    sign = w.a.sign()
    clipped = torch.minimum(sign * w.log_r, sign * w.log_r.clamp(-0.4, 0.4)) * sign
    return -w.a * w.each(clipped)[:, None].exp().expand_as(w.logp)


def dppo(w: World) -> Tensor:
    gap = (w.logp.exp() - w.sampler.exp()).detach()
    return -w.a * w.r * ~(((w.a > 0) & (gap > 0.05)) | ((w.a < 0) & (gap < -0.05)))


def binary_kl(w: World) -> Tensor:
    p, mu = w.logp.exp().detach().clamp(max=0.999), w.sampler.exp().clamp(max=0.999)
    kl = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
    return -w.a * w.r * ~((kl > 0.01) & ((w.a > 0) == (p > mu)))


def icepop(w: World, low: float = 0.85, high: float = 1.2) -> Tensor:
    ratio = (w.logp - w.sampler).exp().detach()
    return -w.a * w.r * ((ratio > low) & (ratio < high))


def trust_mask(w: World) -> Tensor:
    log_p, log_mu = w.logits.log_softmax(-1), w.old_logits.log_softmax(-1)
    kl = (log_mu.exp() * (log_mu - log_p)).sum(-1).detach() * w.m
    return -w.a * w.r * (kl.amax(1, keepdim=True) <= kl.amax(1).median())


def stale_negative(w: World) -> Tensor:
    gap = w.each(w.sampler - w.logp).detach()[:, None]
    return ppo(w) * ~((w.a < 0) & (gap > gap.median()))


def covariance(w: World) -> Tensor:
    product_ = ((w.logp - w.token(w.logp)) * (w.a - w.token(w.a.expand_as(w.logp)))).detach() * w.m
    kept = product_ < product_.flatten().quantile(0.9)
    return torch.where(kept, -w.a * w.r, (-w.a * w.r).detach())


def top_entropy(w: World) -> Tensor:
    h = entropy(w).detach()
    return ppo(w) * (h >= h[w.mask].quantile(0.8))


def gradient_kept(w: World) -> Tensor:
    r, a = w.r, w.a
    scale = torch.where((a < 0) & (r < 0.8), 0.75 * 0.8 / r.detach(), torch.ones_like(r))
    scale = torch.where((a > 0) & (r > 1.2), 1.2 / r.detach(), scale)
    return -a * r * scale


def entropy_shaped(w: World) -> Tensor:
    bonus = torch.minimum(0.4 * entropy(w).detach(), w.a.abs() / 2)
    return ppo(w, a=w.a + bonus)


def gamma_weighted(w: World) -> Tensor:
    log_w = w.sums(w.log_r).detach()[:, None]
    k, rate = torch.where(w.a > 0, 2.0, 3.0), torch.where(w.a > 0, 3.0, 2.0)
    return -w.a * score(w, (k * log_w + rate * (1 - log_w.exp())).exp())


def squared(w: World) -> Tensor:
    left = w.a[:, 0] - 0.5 * w.sums(w.log_r)
    return (left.square() / 2)[:, None].expand_as(w.logp)


def softened(w: World) -> Tensor:
    return -w.a * (1 + 0.2 * torch.tanh((w.r - 1) / 0.2))


def flipped(w: World) -> Tensor:
    r = w.r.detach()
    return -w.a * score(w, torch.where(w.a > 0, (1 / r).clamp(max=3), r.clamp(max=3)))


def learned_offline(w: World) -> Tensor:
    p = w.logp.exp()
    offline = (torch.arange(len(w.logp)) % 4 == 0)[:, None]
    return torch.where(offline, -w.a.abs() * p / (p + 0.1), ppo(w))


POLICIES: dict[str, Tokens] = {
    "ppo, dual clip": lambda w: torch.where(w.a < 0, torch.minimum(ppo(w), -1.5 * w.a), ppo(w)),
    "ppo, clip-higher nobody passed": lambda w: ppo(w, 0.17, 0.37),
    "geometric mean of clipped ratios": geometric,
    "sequence ratio, clipped at 3e-3": lambda w: ppo(w, 3e-2, 4e-2, r=whole(w).exp()).expand_as(w.logp),
    "sequence ratio carried by each token": lambda w: -w.a * whole(w).exp().detach() * w.live,
    "sequence product of ratios, cut at 2": lambda w: -w.a * score(w, w.sums(w.log_r)[:, None].exp().clamp(max=2)),
    "cispo with a lower bound": lambda w: -w.a * score(w, w.r.clamp(0.9, 1.13)),
    "tapered: negatives cut at ratio 1": lambda w: -w.a * score(w, torch.where(w.a > 0, 1, w.r.clamp(max=1))),
    "ratio flipped for positives": flipped,
    "advantage-weighted regression": lambda w: -score(w, (w.a / 1.3).exp()),
    "positives only": lambda w: -w.a.clamp(min=0) * w.r,
    "negatives reinforced, positives at a tenth": lambda w: -torch.where(w.a > 0, 0.1 * w.a, w.a) * w.r,
    "squared regret of a completion": squared,
    "soft clip by tanh": softened,
    "sigmoid gate with a temperature": lambda w: -w.a * torch.sigmoid(3.3 * (w.r - 1)) * 4 / 3.3,
    "gamma weight of the completion": gamma_weighted,
    "no clip, total-variation mask": dppo,
    "no clip, binary KL mask": binary_kl,
    "icepop": icepop,
    "completions beyond a trust region masked": trust_mask,
    "stale completions with negative advantage masked": stale_negative,
    "clip-cov": covariance,
    "top entropy quantile": top_entropy,
    "clipped tokens keep a gradient": gradient_kept,
    "advantage shaped by entropy": entropy_shaped,
    "discounted towards the start": lambda w: ppo(w, a=w.a * 0.97 ** torch.arange(w.logp.shape[1])),
    "log-probability of demonstrations among the samples": learned_offline,
    "truncated sampler weight at 1.01": lambda w: ppo(w) * (w.old - w.sampler).exp().clamp(max=1.01),
    "unlikelihood for negatives": lambda w: torch.where(w.a > 0, -w.a * w.logp, w.a * torch.log1p(-w.logp.exp())),
    "first tokens left out": lambda w: ppo(w) * (torch.arange(w.logp.shape[1]) >= 2),
    "p-norm ratio": lambda w: -w.a * w.r.pow(0.5) / 0.5,
}
"""Policy losses, each beside the right KL under one token mean."""


# KLs


def heads_with_tail(w: World, k: int = 4) -> Tensor:
    log_p, log_q = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    head = log_p.detach().topk(k, -1).indices
    outside = ~(head == w.ids[..., None]).any(-1)
    return klamp.topk_kl(log_p.gather(-1, head), log_q.gather(-1, head), w.logp, w.ref.detach(), outside)


def mixed(w: World, share: float = 0.3) -> Tensor:
    return torch.logaddexp(w.ref + torch.tensor(1 - share).log(), w.old + torch.tensor(share).log())


def average(w: World) -> Tensor:
    """Log-probabilities of a moving average that nobody passes."""
    return pick(0.5 * w.old_logits + 0.5 * w.ref_logits.roll(1, -1), w.ids).detach()


def divergence(w: World, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """An expectation over the vocabulary."""
    return f(w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)).sum(-1)


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    return (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2


def places(w: World) -> Tensor:
    return torch.arange(w.logp.shape[1]).to(w.logp)


KLS: dict[str, Tokens] = {
    "annealed by place": lambda w: 0.9 ** places(w) * right_kl(w),
    "rising by place": lambda w: (1 - (-places(w) / 4).exp()) * right_kl(w),
    "on tokens of low entropy": lambda w: right_kl(w) * (entropy(w).detach() < entropy(w).detach()[w.mask].median()),
    "on completions with negative advantage": lambda w: right_kl(w) * (w.a < 0),
    "with a beta of each prompt": lambda w: (
        right_kl(w) * (1 + torch.arange(len(w.logp)) // w.group)[:, None].to(w.logp)
    ),
    "weighted by the share of surprise": lambda w: right_kl(w) * (w.ref.detach() / w.token(w.ref.detach())),
    "to the mixture of reference and old policy": lambda w: w.r * k3(w.logp - mixed(w)),
    "to the reference and to a moving average": lambda w: right_kl(w) + w.r * k3(w.logp - average(w)),
    "to the reference, and k2 to the old policy": lambda w: right_kl(w) + 0.4 * w.log_r.square(),
    "exact, beside the log-probabilities": exact_kl,
    "exact, half of it sampled": lambda w: 0.5 * exact_kl(w) + 0.5 * right_kl(w),
    "a head and its sampled tail": heads_with_tail,
    "Jensen-Shannon, exact": lambda w: divergence(w, js),
    "Huber of the log-ratio": lambda w: huber_loss(w.d, torch.zeros_like(w.d), reduction="none", delta=0.2),
    "soft-bounded log-ratio": lambda w: w.live * (0.5 * torch.tanh(w.d / 0.5)).detach(),
    "straight-through bound": lambda w: w.logp * w.d.detach().clamp(-0.25, 0.25),
    "k1 with an exact baseline": lambda w: score(w, w.r * (w.d - exact_kl(w))),
    "k1 with the mean of the batch as baseline": lambda w: score(w, w.d - w.token(w.d)),
    "k1 with the mean of the completion's others": lambda w: score(w, w.d - (w.sums(w.d)[:, None] - w.d) / w.m.sum()),
    "whole-sequence k1, leave one out": lambda w: score(
        w, (w.sums(w.d) - (w.sums(w.d).sum() - w.sums(w.d)) / (len(w.d) - 1))[:, None].expand_as(w.d)
    ),
    "future sums, discounted": lambda w: score(w, discounted(w, w.d, 0.9)),
    "Renyi, order 1/2, per token": lambda w: score(w, 2 * (1 - (-w.d / 2).exp())),
    "gated by the mean of the group": lambda w: right_kl(w) * over_budget(w),
    "weighted by min(ratio, 1.05)": lambda w: score(w, w.r.clamp(max=1.05) * w.d),
    "weighted by policy / sampler": lambda w: score(w, (w.logp - w.sampler).exp() * w.d),
    "low-variance reverse, cut at 10": lambda w: (w.live * k3(w.d)).clamp(-10, 10),
    "squared, of probabilities": lambda w: (w.logp.exp() - w.ref.exp()).square(),
    "k2 of the mean log-ratio": lambda w: w.each(w.d)[:, None].square().expand_as(w.d) / 2,
}
"""KLs, each beside PPO's loss under one token mean."""


def discounted(w: World, x: Tensor, gamma: float) -> Tensor:
    """The discounted sum of this and later tokens."""
    total, columns = torch.zeros(len(x), dtype=x.dtype), []
    for column in (x * w.m).flip(1).unbind(1):
        total = column + gamma * total
        columns.append(total)
    return torch.stack(columns[::-1], 1)


def over_budget(w: World) -> Tensor:
    """1 for completions of prompts whose KL is above the median."""
    kl = w.sums(k3(w.d)).detach().reshape(-1, w.group).mean(1)
    return (kl >= kl.median()).repeat_interleave(w.group)[:, None]


# means


def of_prompts(w: World, x: Tensor) -> Tensor:
    sums, counts = w.sums(x).reshape(-1, w.group).sum(1), w.m.sum(1).reshape(-1, w.group).sum(1)
    return (sums / counts).mean()


def of_halves(w: World, x: Tensor) -> Tensor:
    half = len(x) // 2
    return sum(((x * w.m)[i].sum() / w.m[i].sum() for i in (slice(0, half), slice(half, None))), torch.zeros(())) / 2


MEANS: dict[str, Callable[[World, Tensor], Tensor]] = {
    "mean of each prompt's token mean": of_prompts,
    "mean of two micro-batch means": of_halves,
    "lengths to the power -1/2": lambda w, x: (w.sums(x) / w.m.sum(1).sqrt()).mean(),
    "lengths to the power 1/2": lambda w, x: (w.sums(x) / w.m.sum(1).pow(0.5)).sum() / 64,
    "lengths to the power -2": lambda w, x: (w.sums(x) / w.m.sum(1).pow(2)).mean(),
    "logarithm of lengths": lambda w, x: (w.sums(x) / w.m.sum(1).log1p()).mean(),
    "fixed length": lambda w, x: (x * w.m).sum() / (len(x) * 100),
    "sum": lambda w, x: (x * w.m).sum(),
    "weight of each completion": lambda w, x: (w.each(x) * (1 + w.rewards)).mean(),
    "weight of each place": lambda w, x: w.token(x / (1 + places(w)).sqrt()),
    "a quarter of an accumulation window": lambda w, x: (x * w.m).sum() / 1234,
}
"""What the sum of policy loss and KL is reduced by."""


# whole losses


def with_value_head(w: World) -> Tensor:
    head = torch.linspace(-1, 1, w.logits.shape[-1]).to(w.logits).requires_grad_()
    values = w.logits.detach() @ head
    return w.token(ppo(w) + BETA * right_kl(w)) + 0.1 * w.token((values - w.rewards[:, None]).square())


def value_head_on_trunk(w: World) -> Tensor:
    values = w.logits @ torch.linspace(-1, 1, w.logits.shape[-1]).to(w.logits)
    return w.token(ppo(w) + BETA * right_kl(w)) + 0.1 * w.token((values - w.rewards[:, None]).square())


def anchors(w: World) -> Tensor:
    """Two anchors: the reference and a teacher that nobody passes."""
    teacher = pick(w.ref_logits.roll(1, 0), w.ids).detach()
    return w.token(ppo(w) + BETA * right_kl(w) + 0.5 * w.r * k3(w.logp - teacher))


def self_imitation(w: World) -> Tensor:
    best = w.a == w.a.amax()
    return w.token(ppo(w) + BETA * right_kl(w) - 0.1 * w.logp * best)


def spread_of_lengths(w: World) -> Tensor:
    """Sequence mean for the policy, token mean for the KL: two means, a warning."""
    return w.sequence(ppo(w)) + BETA * w.token(right_kl(w))


WHOLE: dict[str, Callable[[World], Any]] = {
    "entropy bonus from the logits": lambda w: w.token(ppo(w) + BETA * right_kl(w) - 0.01 * entropy(w)),
    "entropy bonus from the sample": lambda w: w.token(ppo(w) + BETA * right_kl(w) + 0.01 * w.live * w.logp.detach()),
    "entropy bonus, -p log p of the sample": lambda w: w.token(
        ppo(w) + BETA * right_kl(w) + 0.01 * w.logp.exp() * w.logp
    ),
    "value head beside it": with_value_head,
    "value head on the trunk": value_head_on_trunk,
    "two anchors": anchors,
    "self-imitation beside it": self_imitation,
    "two means": spread_of_lengths,
    "router loss beside it": lambda w: w.token(ppo(w) + BETA * right_kl(w)) + 1e-3 * w.logits.square().mean(),
    "length penalty in the loss": lambda w: (
        w.token(ppo(w) + BETA * right_kl(w)) + 1e-3 * score(w, w.m.sum(1)[:, None]).mul(w.m).mean()
    ),
    "distillation alone": lambda w: (BETA * w.token(right_kl(w)), {"advantages": None}),
    "distillation alone, exact": lambda w: (BETA * w.token(exact_kl(w)), {"advantages": None}),
    "teacher's log-ratio as the advantage": lambda w: (w.token(-(w.ref - w.logp).detach() * w.r), {"advantages": None}),
    "forward KL that was meant": lambda w: (w.token(ppo(w) + BETA * w.r.detach() * k3(w.d)), {"means": "forward"}),
    "two losses: samples and a pretraining batch": lambda w: (
        w.token(ppo(w) + BETA * right_kl(w)) - 0.1 * pick(w.logits, w.ids.roll(1, 1)).mean()
    ),
}


# a KL inside the advantages


def in_advantages(form: str, size: str) -> Callable[[World], Any]:
    """KL in the reward, advantages formed after it, as they are passed."""

    def loss(w: World) -> Any:
        d = w.d.detach() if size != "stale, summed" else (w.old - w.ref).detach()
        kl = w.each(d) if size == "mean" else w.sums(d)
        if form in ("to go", "per token", "whitened per token", "gae"):
            course = {"to go": 1.0, "gae": 0.95}.get(form, 0.0)
            a = w.a.detach() - BETA * (discounted(w, d, course) if course else d)
            if form == "whitened per token":
                a = (a - w.token(a)) / ((a - w.token(a)).square() * w.m).sum().div(w.m.sum()).sqrt()
        else:
            a = normalised(w.rewards - BETA * kl, w.group, form)
        passed = a.to(w.logp)
        return w.token(ppo(w, a=passed if passed.ndim == 2 else passed[:, None])), {"advantages": passed}

    return loss


def normalised(x: Tensor, group: int, form: str) -> Tensor:
    """Rewards to advantages."""
    y = x.reshape(-1, group)
    centred = y - y.mean(1, keepdim=True)
    return {
        "mean": centred,
        "z-score": centred / (y.std(1, keepdim=True) + 1e-4),
        "biased z-score": centred / (y.std(1, keepdim=True, correction=0) + 1e-6),
        "leave one out": centred * group / (group - 1),
        "batch": ((x - x.mean()) / x.std())[:, None],
        "group mean, batch deviation": centred / centred.std(),
        "median": (y - y.median(1, keepdim=True).values) / (y - y.median(1, keepdim=True).values).abs().mean(),
        "range": (y - y.amin(1, keepdim=True)) / (y.amax(1, keepdim=True) - y.amin(1, keepdim=True)) - 0.5,
        "rank": y.argsort(1).argsort(1).to(y) / (group - 1) - 0.5,
        "none": y,
        "clipped": (centred / (y.std(1, keepdim=True) + 1e-4)).clamp(-1.05, 1.05),
    }[form].flatten()


FORMS = (
    *("mean", "z-score", "biased z-score", "leave one out", "batch", "group mean, batch deviation"),
    *("median", "range", "rank", "none", "clipped"),
)
COURSES = ("to go", "per token", "whitened per token", "gae")


# klamp's own losses


def own_loss(surrogate: Any, reduction: Reduction, **term: Any) -> Callable[[World], Any]:
    """klamp's loss under one configuration; `trust` and `teacher` in it say what else the loss holds."""

    def loss(w: World) -> Any:
        chosen = dict(term)
        trust, teacher = chosen.pop("trust", {}), chosen.pop("teacher", False)
        kl = klamp.KLTerm(**chosen, **({"anchor": "teacher"} if teacher else {}))
        whole = term.get("value") in ("exact", "topk")
        batch = klamp.Batch(
            policy_logprobs=w.logp,
            mask=w.mask,
            advantages=w.advantages,
            old_logprobs=w.old,
            ref_logprobs=w.ref,
            sampler_logprobs=w.sampler,
            teacher_logprobs=w.ref if teacher else None,
            group_size=w.group,
            exact_kl=exact_kl(w) if whole else None,
            reference_length=10.0,
        )
        objective = klamp.Objective(
            surrogate=surrogate,
            reduction=reduction,
            max_length=50,
            clip_low=0.2,
            clip_high=0.28,
            trust=TrustRegion(**trust),
            **({"others": (klamp.Weighted(BETA, kl),)} if teacher else {"beta": BETA, "kl": kl}),
        )
        logits = {"logits": w.logits, "ref_logits": w.ref_logits, "ids": w.ids} if whole else {}
        return klamp.grpo_loss(batch, objective).loss, {"clip": (0.2, 0.28), **logits}

    return loss


TERMS: list[dict[str, Any]] = [
    *({"value": value, "gradient": "reverse"} for value in ("k1", "k2", "k3")),
    {"horizon": "sequence"},
    {"value": "k1", "horizon": "sequence"},
    {"off_policy": "token"},
    {"off_policy": "token", "max_weight": 1.1},
    {"off_policy": "sequence"},
    {"off_policy": "sequence", "horizon": "sequence"},
    {"max_log_ratio": 0.2},
    {"placement": "advantage"},
    {"placement": "advantage", "horizon": "sequence"},
    {"clip_method": "hard", "clip_threshold": 0.005},
    {"clip_method": "soft", "clip_threshold": 0.05, "clip_temperature": 0.3},
    {"value": "exact"},
    {"value": "exact", "horizon": "sequence"},
    {"value": "topk"},
    {"normalizer": "sequence_mean"},
    {"value": "k2", "gradient": "own"},
    {"teacher": True},
    {"teacher": True, "value": "k1", "horizon": "sequence"},
    {"trust": {"mode": "token_truncate", "high": 1.02}},
    {"trust": {"mode": "sequence_mask", "low": 0.9, "high": 1.2}},
    {"trust": {"threshold": 0.01}},
]


def own_penalty(**choice: Any) -> Callable[[World], Any]:
    """klamp's penalty beside PPO's loss."""

    def loss(w: World) -> Any:
        behavior = w.old if choice.get("off") else None
        more = {k: x for k, x in choice.items() if k != "off"}
        return w.token(ppo(w) + BETA * klamp.kl_penalty(w.logp, w.ref, w.mask, behavior_logprobs=behavior, **more))

    return loss


def sound_cases(part: str = "") -> Iterator[Case]:
    """All sound losses, or one part of them: policies, kls, means, whole, advantages, klamp."""
    if part in ("", "policies"):
        for name, policy in POLICIES.items():
            yield Case(name, lambda w, f=policy: w.token(f(w) + BETA * right_kl(w)), beta=None)
    if part in ("", "kls"):
        for name, kl in KLS.items():
            yield Case(f"KL {name}", lambda w, f=kl: w.token(ppo(w) + BETA * f(w)), beta=None)
    if part in ("", "means"):
        for name, mean in MEANS.items():
            yield Case(name, lambda w, f=mean: f(w, ppo(w) + BETA * right_kl(w)), beta=None)
    if part in ("", "whole"):
        for name, loss in WHOLE.items():
            yield Case(name, loss, beta=None, kl=())
    if part in ("", "advantages"):
        for form, size in product(FORMS, ("summed", "mean", "stale, summed")):
            yield Case(f"KL in the reward, {size}, {form}", in_advantages(form, size), beta=None)
        for form in COURSES:
            yield Case(f"KL in the advantage, {form}", in_advantages(form, ""), beta=None)
    if part in ("", "klamp"):
        surrogates = ("ppo_clip", "cispo", "score_function")
        reductions: tuple[Reduction, ...] = ("token_mean", "sequence_mean", "fixed_length")
        for i, term in enumerate(TERMS):
            for j in range(3):
                surrogate, reduction = surrogates[(i + j) % 3], reductions[(i // 3 + j) % 3]
                name = f"klamp, {surrogate}, {reduction}, {term}"
                yield Case(name, own_loss(surrogate, reduction, **term), beta=None)
        for off, horizon, value in product((False, True), ("token", "sequence"), ("k1", "k2", "k3")):
            choice = {"off": off, "horizon": horizon, "value": value}
            yield Case(f"klamp.kl_penalty {choice}", own_penalty(**choice), beta=None)
