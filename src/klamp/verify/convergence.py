"""Where a configuration ends: the policy at which its expected update is zero, and how far that is from the optimum.

The optimum of E[reward] - price KL(policy||ref) is known: ref(y) exp(reward(y) / price), normalised. Whether a trainer
gets there depends on the whole system: the KL's value, gradient, horizon and place, the reduction of the loss, the
baseline and the scaling of the advantages. Here that system is a small world whose every group of completions is
counted, with klamp's own `grpo_loss` and `group_advantages` on it, so that the update is the expected one.

The end is found by following the update: the gradient in the natural metric of a table of logits, in steps of
1 / beta, in which the exact objective of one token is there at once.

With a teacher and horizon `sequence` the optimum of E[reward] - beta KL(policy||ref) - coef KL(policy||teacher) is

    log policy = (reward + beta log ref + coef log teacher) / (beta + coef) + const

since the two KLs are (beta + coef) KL(policy||mix) and a constant, where the mix is the end without a reward. So beta +
coef is the price of a nat away from the mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.loss import Price, configured_price, divisor, kl_reduction, price_of
from klamp.config.teacher import TeacherConfig
from klamp.core.objective import grpo_loss
from klamp.core.term import Weighted
from klamp.core.types import Reduction
from klamp.errors import ConfigError
from klamp.verify.one_step import Scene, advantages_in_groups, batch_of, less_kl, quietly, scores_of
from klamp.verify.oracle import divergence, gradient_of
from klamp.verify.proofs.check import Check, ProvenAnswer, TextTable, is_equal, is_true
from klamp.verify.worlds import Chain, count_prefixes, enumerate_outcomes, prefix_probs

BETA = 0.2
"""Of the configurations whose end is shown; the price of a nat follows from it."""
COEF = 0.3
"""Of the teachers whose end is shown."""
REACHED = 1e-4
"""Distance to the optimum, in nats, below which a configuration has reached it."""
UPDATES = 600
STILL = 1e-7
"""Size of an update, in nats of a logit, at which the policy stands still."""
SLOWEST = 0.02
"""Least share of an update that is taken; less is taken while updates grow, more while they shrink."""
LARGEST_MOVE = 1.0
"""Most that a logit is moved at once, in nats."""
TINY = 1e-9
"""A price where nothing that stays has one: the optimum is then the best completion."""
FAR = 50.0
"""A log-ratio to the reference, in nats, past which a policy is not coming back."""


class End(NamedTuple):
    """Where a configuration ends in one world; KL in nats per completion, with a teacher that to the mix of both."""

    stands: bool  # whether the policy comes to a standstill; else the rest is where it was when it was given up
    distance: float  # KL(policy||optimum) at the price that is expected
    price: float  # reward per nat of a completion whose optimum is nearest to where it ended
    nearest: float  # KL(policy||optimum) at that price
    nearest_kl: float  # KL(optimum||ref) at that price
    nearest_length: float
    kl: float  # KL(policy||ref) where it ended
    optimal_kl: float
    length: float  # mean length in tokens
    optimal_length: float

    @property
    def exact(self) -> bool:
        """Whether it ends at the optimum."""
        return self.stands and self.distance < REACHED


@cache
def worlds() -> tuple[Scene, ...]:
    """One token out of five; three and six tokens out of three, the first of which ends the completion."""
    return tuple(_world(*sizes) for sizes in ((1, 5, 1, None), (2, 3, 3, 0), (3, 3, 6, 0)))


def _world(seed: int, vocab: int, length: int, eos: int | None) -> Scene:
    """A policy that starts as its reference, which ends often enough that lengths differ; rewards in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rows = count_prefixes(vocab, length, eos=eos)
    ref = 0.7 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    chain = Chain(policy_logits=ref, ref_logits=ref, length=length, eos=eos)
    rewards = torch.rand(len(enumerate_outcomes(chain).probs), generator=generator, dtype=torch.float64)
    teacher = 0.7 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return Scene(chain=replace(chain, teacher_logits=teacher), rewards=rewards)


def follow(kl: KLConfig, loss: LossConfig, world: Scene, teacher: TeacherConfig | None = None) -> End:
    """Follow the expected update of a configuration, with a beta above 0 or a teacher, to its end.

    Raises:
        ConfigError: tokens that carry no KL; the worlds here have none.
    """
    if kl.excludes:
        got = f"kl_exclude_tokens={kl.kl_exclude_tokens}"
        why, fix = "the optimum of a KL over some of the tokens is another one", "leave kl_exclude_tokens out"
        raise ConfigError("tokens without a KL cannot be followed to where they end", got=got, why=why, fix=fix)
    price = configured_price(
        kl, loss, group_size=world.group_size, mean_length=world.mean_length, max_length=world.chain.length
    ).per_completion
    to_ref = 0.0 if kl.reference == "sampler" else price
    to_teacher = 0.0 if teacher is None else teacher_price(teacher, loss, group_size=world.group_size).per_completion
    coefficients = kl.beta + (0.0 if teacher is None else teacher.teacher_coef)
    start = logits = world.chain.logprobs("policy").detach()
    moved = world
    rate, before, size = 0.5, math.inf, math.inf
    for _ in range(UPDATES):
        gradient, divided_by = expected_step(kl, loss, moved, teacher)
        metric = prefix_probs(moved.chain, "policy").detach()[:, None] * logits.exp()  # of the policy's probabilities
        pull = divided_by / coefficients * gradient / metric
        # Before the learning rate, so that a small rate is not a standstill; a shift of a whole row changes nothing.
        size = (pull - (logits.exp() * pull).sum(-1, keepdim=True)).abs().amax().item()
        if size < STILL or not math.isfinite(size) or (logits - start).abs().amax() > FAR:
            break
        logits = (logits - min(rate, LARGEST_MOVE / size) * pull).log_softmax(-1)
        moved = replace(world, chain=replace(world.chain, policy_logits=logits))
        rate = min(1.0, 1.25 * rate) if size < before else max(SLOWEST, 0.5 * rate)
        before = size
    return _describe(moved, to_ref, to_teacher, stands=size < STILL)


def teacher_price(teacher: TeacherConfig, loss: LossConfig, *, group_size: int) -> Price:
    """The price of a nat away from a teacher, whose KL is reduced as the policy loss is; see `price_of`."""
    sizes: dict[str, Any] = {"baseline": loss.advantage_baseline, "scale": loss.scale, "group_size": group_size}
    return price_of(teacher.teacher_coef, placement=teacher.teacher_placement, **sizes)


def expected_step(
    kl: KLConfig, loss: LossConfig, world: Scene, teacher: TeacherConfig | None = None
) -> tuple[Tensor, float]:
    """The gradient of a step in expectation over all groups, [prefixes, vocab], and the divisor of its KL.

    The batch is large: means over tokens divide by the expected length. Every completion is in it once; its weight
    is the share that reaches the update, in the mean over its possible groups.
    """
    made = partial(build_objective, kl, loss)
    outcomes, objective = world.outcomes, quietly(made, max_length=world.chain.length, teacher=teacher)
    count, none = float(len(outcomes.probs)), torch.zeros_like(world.rewards)
    batch = batch_of(scores_of(outcomes, objective, kl, teacher), advantages=none)
    own, of_kl = objective.reduction, kl_reduction(kl, loss)
    divided_by = {
        each: divisor(each, mean_length=world.mean_length, max_length=world.chain.length) for each in (own, of_kl)
    }
    outside = divided_by | {"sequence_mean": 1.0}  # that one divides each completion by its own length, in the loss
    rewards = less_kl(world.rewards, batch, objective.terms)
    batch = replace(batch, advantages=count * expected_advantages(world, loss, rewards) / outside[own])
    reductions: dict[str, Reduction] = {
        term.anchor: of_kl if position == 0 else own for position, (_, term) in enumerate(objective.terms)
    }
    for anchor in batch.anchors.keys() & reductions.keys():
        batch = batch.with_anchor(anchor, weight=count * outcomes.probs / outside[reductions[anchor]])
    terms = [
        Weighted(coefficient, replace(term, normalizer=_summed(reductions[term.anchor])))
        for coefficient, term in objective.terms
    ]
    total = grpo_loss(batch, replace(objective, reduction=_summed(own), terms=tuple(terms))).loss
    return gradient_of(total, world.chain), divided_by[of_kl]


def _summed(reduction: Reduction) -> Reduction:
    """The reduction of a batch whose weights hold the divisor that is the same for every completion."""
    return "sequence_mean" if reduction == "sequence_mean" else "sequence_sum"


def expected_advantages(world: Scene, loss: LossConfig, rewards: Tensor) -> Tensor:
    """How likely a completion is, times its advantage in the mean over the others of its group. [outcomes]"""
    rows, probs = world.groups
    advantages = advantages_in_groups(rewards[rows], loss)
    summed = torch.zeros_like(rewards).index_add(0, rows.flatten(), (probs[:, None] * advantages).flatten())
    return summed / world.group_size


def _describe(world: Scene, to_ref: float, to_teacher: float, *, stands: bool) -> End:
    outcomes, price = enumerate_outcomes(world.chain, unreachable=True), to_ref + to_teacher or TINY
    ended, lengths = outcomes.policy_logprobs.detach().sum(-1), outcomes.mask.sum(-1).double()
    both = to_ref * outcomes.ref_logprobs + to_teacher * outcomes.teacher_logprobs
    ref = (both.sum(-1) / price).log_softmax(-1)
    fitted = fit_price(ended, ref, world.rewards)
    best, nearest = optimum(ref, world.rewards, price), optimum(ref, world.rewards, fitted)
    (kl, length), (optimal_kl, optimal_length), (nearest_kl, nearest_length) = (
        (float(divergence(policy, ref)), float((policy.exp() * lengths).sum())) for policy in (ended, best, nearest)
    )
    return End(
        stands=stands,
        distance=float(divergence(ended, best)),
        price=fitted,
        nearest=float(divergence(ended, nearest)),
        nearest_kl=nearest_kl,
        nearest_length=nearest_length,
        kl=kl,
        optimal_kl=optimal_kl,
        length=length,
        optimal_length=optimal_length,
    )


def optimum(ref: Tensor, rewards: Tensor, price: float) -> Tensor:
    """Log-probabilities of ref exp(reward / price), normalised: the optimum of E[reward] - price KL(policy||ref)."""
    return (ref + rewards / price).log_softmax(-1)


def fit_price(ended: Tensor, ref: Tensor, rewards: Tensor) -> float:
    """The price whose optimum is nearest, in KL(policy||optimum): the one with the same mean reward.

    The KL is convex in 1 / price, with the slope E_optimum[reward] - E_policy[reward]; 0 or infinite where no price is.
    """
    target = float((ended.exp() * rewards).sum())
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if float(((ref + rewards * middle).softmax(-1) * rewards).sum()) < target:
            low = middle
        else:
            high = middle
    return 1 / high if high > 1e-12 else math.inf


TERMS: Mapping[str, KLConfig] = {
    name: quietly(KLConfig, beta=BETA, **choices)  # k1 as a loss is here to be shown, without its caution
    for name, choices in {
        "loss, k3, sequence": {"kl_horizon": "sequence"},
        "loss, k1, sequence": {"kl_estimator": "k1", "kl_horizon": "sequence"},
        "loss, exact, sequence": {"kl_estimator": "exact", "kl_horizon": "sequence"},
        "advantage, k1, sequence": {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
        "reward, k1": {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"},
        "loss, k3, token": {},
        "loss, exact, token": {"kl_estimator": "exact"},
        "advantage, k1, token": {"kl_estimator": "k1", "kl_placement": "advantage"},
        "loss, k3, gradient own": {"kl_gradient": "own"},
        "loss, k1, gradient own": {"kl_estimator": "k1", "kl_gradient": "own"},
    }.items()
}
"""The KL terms, by what they are: placement, value, horizon, gradient."""
LOSSES: Mapping[str, LossConfig] = {
    "fixed length": LossConfig(loss_type="dr_grpo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "token mean": LossConfig(loss_type="dapo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "sequence mean": LossConfig(loss_type="grpo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "sequence mean, std": LossConfig(loss_type="grpo", scale_rewards="std", advantage_baseline="mean"),
}
"""The policy losses around them; the baseline is leave-one-out but where TRL's default is shown."""


def claims_exact(kl: KLConfig, loss: LossConfig) -> bool:
    """Whether klamp says that a configuration of the table ends at the optimum of E[reward] - price KL(policy||ref).

    In the reward: under every reduction and baseline. In the loss or the advantage: over the sequence, where a
    completion's own length divides nothing. Never where advantages are divided by the group's standard deviation.
    """
    over_sequences = kl.kl_gradient == "reverse" and kl.kl_horizon == "sequence" and loss.loss_type != "grpo"
    return loss.scale != "std" and (kl.kl_placement == "reward" or over_sequences)


@cache
def ends(term: str, loss: str) -> tuple[End, ...]:
    """Where a configuration of the table ends, in every world."""
    return tuple(follow(TERMS[term], LOSSES[loss], world) for world in worlds())


def _judge_end(term: str, name: str) -> tuple[str, list[Check]]:
    """The table's row of a configuration, and the checks of klamp's claims about it."""
    kl, loss = TERMS[term], LOSSES[name]
    if kl.kl_placement == "reward" and loss.scale == "std":
        return "refused", []
    worst = max(end.nearest if loss.scale == "std" else end.distance for end in ends(term, name))  # std: no one price
    stands, exact = (all(getattr(end, fact) for end in ends(term, name)) for fact in ("stands", "exact"))
    cell = "runs away" if not stands else "exact" if worst < REACHED else f"{worst:.2g}"
    if not claims_exact(kl, loss):
        claim, most = f"{term}; {name}: does not, and klamp does not say so", f"above {REACHED:g} nats"
        text = f"{worst:.2g} nats away" if stands else "does not stand still"
        return cell, [is_true(claim, not exact, text, expected=most)]
    claim, least = f"{term}; {name}: ends at the optimum", f"below {REACHED:g} nats"
    at_optimum = is_true(claim, exact, f"at most {worst:.0e} nats away", expected=least)
    claim = f"{term}; {name}: at the price that is printed"
    return cell, [at_optimum, is_equal(claim, ends(term, name)[-1].price, BETA, tolerance=1e-6)]


def answer_convergence() -> ProvenAnswer:
    """Which settings reach the optimum that they claim?"""
    judged = {term: [_judge_end(term, name) for name in LOSSES] for term in TERMS}
    checks = [check for cells in judged.values() for _, checks in cells for check in checks]
    table = TextTable(
        title="distance to the optimum, KL(policy||optimum) in nats, the largest of 1, 3 and 6 tokens (with std: "
        "to the optimum of the price that fits best)",
        columns=("KL, beta 0.2", *LOSSES),
        rows=tuple((term, *(cell for cell, _ in cells)) for term, cells in judged.items()),
    )
    return ProvenAnswer(
        question="Where does each configuration end, and is that the optimum ref exp(reward / price)?",
        tables=(table,),
        checks=(*checks, *_baselines()),
        words=(
            "The expected update of the whole system (term, reduction, baseline, scaling of advantages) is followed "
            "until it is zero. Where a configuration claims to be exact it ends at the optimum of E[reward] - price "
            "KL(policy||ref); the distances of the others are what they are.",
            "A KL in the reward, without division by the standard deviation, ends there under every reduction. A KL in "
            "the loss or the advantage does so over the sequence, where no completion is divided by its own length. "
            "The token horizon leaves out what a token does to the KL of later ones, and ends further away than "
            "asked; k1 as a loss never stands still.",
        ),
    )


def _baselines() -> Iterator[Check]:
    """The group's mean as a baseline makes the price G / (G - 1) times beta, but for a KL in the reward."""
    world = worlds()[-1]
    loss = replace(LOSSES["fixed length"], advantage_baseline="mean")
    for term in ("loss, k3, sequence", "advantage, k1, sequence", "reward, k1"):
        kl = TERMS[term]
        end = follow(kl, loss, world)
        price = configured_price(kl, loss, group_size=world.group_size, mean_length=1.0, max_length=world.chain.length)
        times = price.per_completion / BETA
        claim = f"{term}; against the group's mean of {world.group_size}: the price is {times:g} beta"
        yield is_equal(claim, end.price, price.per_completion, tolerance=1e-6)
