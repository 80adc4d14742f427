"""Sound losses that people train with and that no short list of candidates holds: none is accused, some are named."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import discounted, entropy, exact_kl, head_of, k3, ppo, ratio_k3, score, without_rewards
from tests.audit.bench.worlds import BETA, Case, Score, World, made_cases, pick, three_worlds
from torch import Tensor
from torch.nn.functional import huber_loss

import klamp

SLOW = pytest.mark.slow


def policies(w: World) -> dict[str, Tensor]:
    """Policy losses, each beside the right KL under one token mean."""
    a, r, up = w.a, w.r, w.a > 0
    whole, total, gap = w.each(w.log_r)[:, None], w.sums(w.log_r)[:, None], (w.logp.exp() - w.sampler.exp()).detach()
    log_p, log_mu = w.logits.log_softmax(-1), w.old_logits.log_softmax(-1)
    far = ((log_mu.exp() * (log_mu - log_p)).sum(-1).detach() * w.m).amax(1, keepdim=True)
    moved = ((w.logp - w.token(w.logp)) * (a - w.token(a.expand_as(w.logp)))).detach() * w.m
    return {
        "ppo, dual clip": torch.where(a < 0, torch.minimum(ppo(w), -1.5 * a), ppo(w)),
        "sequence ratio, clipped": ppo(w, 3e-2, 4e-2, r=whole.exp()).expand_as(w.logp),
        "sequence product of ratios, cut at 2": -a * score(w, total.exp().clamp(max=2)),
        "cispo with a lower bound": -a * score(w, r.clamp(0.9, 1.13)),
        "ratio flipped for positives": -a * score(w, torch.where(up, 1 / r, r).clamp(max=3)),
        "soft clip by tanh": -a * (1 + 0.2 * torch.tanh((r - 1) / 0.2)),
        "sigmoid gate with a temperature": -a * torch.sigmoid(3.3 * (r - 1)) * 4 / 3.3,
        "no clip, total-variation mask": -a * r * ~((up & (gap > 0.05)) | (~up & (gap < -0.05))),
        "icepop": -a * r * ((w.logp - w.sampler).detach().abs() < 0.17),
        "completions beyond a trust region masked": -a * r * (far <= far.median()),
        "clip-cov": torch.where(moved < moved.flatten().quantile(0.9), -a * r, (-a * r).detach()),
        "advantage shaped by entropy": ppo(w, a=a + torch.minimum(0.4 * entropy(w).detach(), a.abs() / 2)),
        "discounted towards the start": ppo(w, a=a * 0.97**w.places),
        "unlikelihood for negatives": torch.where(up, -a * w.logp, a * torch.log1p(-w.logp.exp())),
    }


def kls(w: World) -> dict[str, Tensor]:
    log_p, log_q, right, d, h = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1), ratio_k3(w), w.d, entropy(w)
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    average = pick(0.5 * w.old_logits + 0.5 * w.ref_logits.roll(1, -1), w.ids).detach()
    outside = ~(w.logits.detach().topk(4).indices == w.ids[..., None]).any(-1)
    return {
        "annealed by place": 0.9**w.places * right,
        "on tokens of low entropy": right * (h < h[w.mask].median()),
        "with a beta of each prompt": right * (1 + torch.arange(len(w.ids)) // w.group)[:, None],
        "on completions with negative advantage": right * (w.a < 0),
        "to a mixture": w.r * k3(w.logp - torch.logaddexp(w.ref - 0.36, w.old - 1.2)),
        "to the reference and to a moving average": right + w.r * k3(w.logp - average),
        "exact, beside the log-probabilities": exact_kl(w),
        "a head and its sampled tail": klamp.topk_kl(*head_of(w, whose=w.logits), w.logp, w.ref.detach(), outside),
        "Jensen-Shannon, exact": (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2,
        "Huber of the log-ratio": huber_loss(d, torch.zeros_like(d), reduction="none", delta=0.2),
        "soft-bounded log-ratio": w.live * (0.5 * torch.tanh(d / 0.5)).detach(),
        "straight-through bound": w.logp * d.detach().clamp(-0.25, 0.25),
        "k1 with an exact baseline": score(w, w.r * (d - exact_kl(w))),
        "whole-sequence k1, centred": score(w, (w.sums(d) - w.sums(d).mean())[:, None].expand_as(d)),
        "future sums, discounted": score(w, discounted(w, d, 0.9)),
        "Renyi, order 1/2, per token": score(w, 2 * (1 - (-d / 2).exp())),
        "squared, of probabilities": (w.logp.exp() - w.ref.exp()).square(),
    }


def means(w: World) -> dict[str, Tensor]:
    """What the sum of policy loss and KL is reduced by."""
    x, lengths = ppo(w) + BETA * ratio_k3(w), w.m.sum(1)
    prompts = [y.reshape(-1, w.group).sum(1) for y in (w.sums(x), lengths)]
    halves = [total.sum() / m.sum() for total, m in zip((x * w.m).chunk(2), w.m.chunk(2), strict=True)]
    return {
        "mean of each prompt's token mean": (prompts[0] / prompts[1]).mean(),
        "mean of two micro-batch means": (halves[0] + halves[1]) / 2,
        "lengths to the power -1/2": (w.sums(x) / lengths.sqrt()).mean(),
        "weight of each completion": (w.each(x) * (1 + w.rewards)).mean(),
        "weight of each place": w.token(x / (1 + w.places).sqrt()),
    }


def whole(w: World) -> dict[str, Any]:
    x, alone = ppo(w) + BETA * ratio_k3(w), {"advantages": None}
    values = w.logits @ torch.linspace(-1, 1, w.logits.shape[-1]).to(w.logits)
    teacher = pick(w.ref_logits.roll(1, 0), w.ids).detach()
    return {
        "entropy bonus from the sample": w.token(x + 0.01 * w.live * w.logp.detach()),
        "value head on the trunk": w.token(x + 0.1 * (values - w.rewards[:, None]).square()),
        "two anchors": w.token(x + 0.5 * w.r * k3(w.logp - teacher)),
        "self-imitation beside it": w.token(x - 0.1 * w.logp * (w.a == w.a.amax())),
        "router loss beside it": w.token(x) + 1e-3 * w.logits.square().mean(),
        "length penalty in the loss": w.token(x + 1e-3 * score(w, w.m.sum(1)[:, None])),
        "distillation alone": (BETA * w.token(ratio_k3(w)), alone),
        "teacher's log-ratio as the advantage": (w.token(-(w.ref - w.logp).detach() * w.r), alone),
        "a pretraining batch beside it": w.token(x) - 0.1 * pick(w.logits, w.ids.roll(1, 1)).mean(),
        "cross-entropy": (-w.token(w.logp), dict.fromkeys(("ref_logprobs", "advantages", "beta"))),
    }


PARTS: dict[str, Callable[[World], dict[str, Any]]] = {
    "policies": lambda w: {name: w.token(x + BETA * ratio_k3(w)) for name, x in policies(w).items()},
    "kls": lambda w: {name: w.token(ppo(w) + BETA * x) for name, x in kls(w).items()},
    "means": means,
    "whole": whole,
    "advantages": lambda w: {case.name: case.loss(w) for case in without_rewards()},
}
FLOOR = 0.258
"""The share of all these losses that is named at least; none of them is in the list of candidates."""


def cases(part: str, world: World, first: int = 0, step: int = 1) -> Iterator[tuple[Case, World]]:
    kl = () if part == "whole" else ("reverse",)
    return product(made_cases(PARTS[part](world), kl=kl, beta=None)[first::step], [world])


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("watched", [True, pytest.param(False, marks=SLOW)])
def test_none_is_accused(watched: bool, step: int) -> None:
    worlds = [w.watch() if watched else w for w in three_worlds()]
    made = (pair for part, (i, w) in product(PARTS, enumerate(worlds)) for pair in cases(part, w, i % step, step))
    Score(made).demand(FLOOR if step == 1 else 0.0, misnamed=False)


@pytest.mark.parametrize(
    "name", [None, *(pytest.param(x, marks=SLOW) for x in ("sampler_logprobs", "advantages", "beta"))]
)
def test_none_is_accused_where_less_is_passed(name: str | None) -> None:
    assert sum(len([*cases(part, three_worlds()[0])]) for part in PARTS) >= 50
    for part, (i, world) in product(PARTS, enumerate(three_worlds()[:2])):
        Score(cases(part, world, i, 2 if name else 9), **{name or "old_logprobs": None}).demand()
