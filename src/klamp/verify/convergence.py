"""Where a configuration ends: the policy at which its expected update is zero, and how far that is from the optimum.

The optimum of E[reward] - price KL(policy||ref) is known: ref(y) exp(reward(y) / price), normalised. Whether a trainer
gets there depends on the whole system: the KL's value, gradient, horizon and place, the reduction of the loss, the
baseline and the scaling of the advantages. Here that system is a small world whose every group of completions is
counted, with klamp's own `grpo_loss` and `group_advantages` on it, so that the update is the expected one.

The end is found by following the update: the gradient in the natural metric of a table of logits, in steps of
1 / beta, in which the exact objective of one token is there at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.loss import divisor, kl_reduction
from klamp.config.price import configured_price
from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss
from klamp.core.penalty import shifted_rewards
from klamp.core.term import KLTerm
from klamp.core.types import Batch, Reduction
from klamp.errors import ConfigError
from klamp.verify.oracle import gradient_of
from klamp.verify.worlds import Chain, Outcomes, count_prefixes, enumerate_outcomes, prefix_probs

BETA = 0.2
"""Of the configurations whose end is shown; the price of a nat follows from it."""
REACHED = 1e-4
"""Distance to the optimum, in nats, below which a configuration has reached it."""
UPDATES = 600
"""Most updates that are followed."""
STILL = 1e-7
"""Size of an update, in nats of a logit, at which the policy stands still."""
SLOWEST = 0.02
"""Least share of an update that is taken; less is taken while updates grow, more while they shrink."""
LARGEST_MOVE = 1.0
"""Most that a logit is moved at once, in nats."""
FAR = 50.0
"""A log-ratio to the reference, in nats, past which a policy is not coming back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A language model that can be counted, its reference, and the reward of every completion."""

    name: str
    chain: Chain
    """The policy starts as the reference."""
    rewards: Tensor
    """The reward of each completion, in the order of `enumerate_outcomes`."""
    group_size: int = 2
    """Completions per prompt; every group of so many is counted."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Where a configuration ends in one world; KL in nats per completion."""

    world: str
    """The name of the world."""
    stands: bool
    """Whether the policy comes to a standstill; else the rest is where it was when it was given up."""
    updates: int
    """The number of updates that were followed."""
    distance: float
    """KL(policy||optimum) at the price that is expected."""
    price: float
    """Reward per nat of a completion whose optimum is nearest to where it ended."""
    nearest: float
    """KL(policy||optimum) at that price."""
    kl: float
    """KL(policy||ref) where it ended."""
    optimal_kl: float
    """KL(optimum||ref)."""
    reward: float
    """The mean reward where it ended."""
    optimal_reward: float
    """Mean reward of the optimum."""
    length: float
    """Mean length in tokens."""
    optimal_length: float
    """Mean length of the optimum."""

    @property
    def exact(self) -> bool:
        """Whether it ends at the optimum."""
        return self.stands and self.distance < REACHED


@cache
def worlds() -> tuple[World, ...]:
    """One token out of five; three and six tokens out of three, the first of which ends the completion."""
    return (
        _world("1 token", seed=1, vocab=5, length=1, eos=None),
        _world("3 tokens", seed=2, vocab=3, length=3, eos=0),
        _world("6 tokens", seed=3, vocab=3, length=6, eos=0),
    )


def _world(name: str, *, seed: int, vocab: int, length: int, eos: int | None) -> World:
    """A reference with independent logits, ending often enough that lengths differ; rewards in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rows = count_prefixes(vocab, length, eos=eos)
    ref = 0.7 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    chain = Chain(policy_logits=ref, ref_logits=ref, length=length, eos=eos)
    count = len(enumerate_outcomes(chain).probs)
    return World(name=name, chain=chain, rewards=torch.rand(count, generator=generator, dtype=torch.float64))


def follow(kl: KLConfig, loss: LossConfig, world: World) -> End:
    """Follow the expected update of a configuration to its end.

    Args:
        kl: the KL term, with a beta above 0.
        loss: the policy loss around it.
        world: where.

    Raises:
        ConfigError: tokens that carry no KL; the worlds here have none.
    """
    if kl.excludes:
        raise ConfigError(
            "tokens without a KL cannot be followed to where they end",
            got="a kl_exclude_* field",
            why="the optimum of a KL over some of the tokens is another one",
            fix="leave kl_exclude_tokens, kl_exclude_prefix and kl_exclude_between out",
        )
    length = _mean_length(enumerate_outcomes(world.chain))
    price = configured_price(
        kl, loss, group_size=world.group_size, mean_length=length, max_length=world.chain.length
    ).per_completion
    fixed = None if kl.kl_placement == "reward" else advantages_in_groups(world.rewards, loss, world.group_size)
    start = logits = world.chain.logprobs("policy").detach()
    rate, before, size, updates = 0.5, math.inf, math.inf, 0
    for updates in range(1, UPDATES + 1):  # noqa: B007  (it is reported)
        chain = replace(world.chain, policy_logits=logits)
        update, divided_by = natural_update(kl, loss, chain, world, advantages=fixed)
        pull = divided_by / kl.beta * update
        # Not of what is taken of it, so that a small rate is not a standstill; a shift of a whole row changes nothing.
        size = (pull - (logits.exp() * pull).sum(-1, keepdim=True)).abs().amax().item()
        if size < STILL or not math.isfinite(size) or (logits - start).abs().amax() > FAR:
            break
        logits = (logits - min(rate, LARGEST_MOVE / size) * pull).log_softmax(-1)
        rate = min(1.0, 1.25 * rate) if size < before else max(SLOWEST, 0.5 * rate)
        before = size
    stands = size < STILL
    return _describe(replace(world.chain, policy_logits=logits), world, price, stands=stands, updates=updates)


def natural_update(
    kl: KLConfig, loss: LossConfig, chain: Chain, world: World, *, advantages: Tensor | None = None
) -> tuple[Tensor, float]:
    """The expected gradient of a step in the metric of the policy's own probabilities, and what the KL is divided by.

    Equation: grad_{s,v} / (P(s) policy(v|s)).
    """
    gradient, divided_by = expected_step(kl, loss, chain, world, advantages=advantages)
    probs = chain.logprobs("policy").detach().exp()
    return gradient / (prefix_probs(chain, "policy").detach()[:, None] * probs), divided_by


def expected_step(
    kl: KLConfig, loss: LossConfig, chain: Chain, world: World, *, advantages: Tensor | None = None
) -> tuple[Tensor, float]:
    """The gradient of a step in expectation over all groups, [prefixes, vocab], and the divisor of its KL.

    The batch is large: means over tokens divide by the expected length. Every completion stands in it once; how much of
    it reaches the update, in the mean over the groups that it may be in, is its weight. `advantages` are those of the
    world's own rewards (`advantages_in_groups`), which no KL in the reward moves from step to step.
    """
    outcomes, objective = enumerate_outcomes(chain), build_objective(kl, loss, max_length=chain.length)
    batch, count = _batch(outcomes, objective.kl), float(len(outcomes.probs))
    own, of_kl, rewards = objective.reduction, kl_reduction(kl, loss), world.rewards
    divided_by = {
        each: divisor(each, mean_length=_mean_length(outcomes), max_length=chain.length) for each in (own, of_kl)
    }
    outside = divided_by | {"sequence_mean": 1.0}  # that one divides each completion by its own length, in the loss
    if objective.beta > 0 and objective.kl.placement == "reward":
        rewards = shifted_rewards(rewards, batch, objective.kl, beta=objective.beta)
    if advantages is None:
        advantages = advantages_in_groups(rewards, loss, world.group_size)
    expected = expected_advantages(advantages, outcomes.probs)
    weighted = replace(
        batch,
        advantages=count * outcomes.probs * expected / outside[own],
        kl_weight=count * outcomes.probs / outside[of_kl],
    )
    whole = replace(objective, reduction=_summed(own), kl=replace(objective.kl, normalizer=_summed(of_kl)))
    return gradient_of(grpo_loss(weighted, whole).loss, chain), divided_by[of_kl]


def _summed(reduction: Reduction) -> Reduction:
    """The reduction of a batch whose weights hold the divisor that is the same for every completion."""
    return "sequence_mean" if reduction == "sequence_mean" else "sequence_sum"


def advantages_in_groups(rewards: Tensor, loss: LossConfig, group_size: int) -> Tensor:
    """The advantages in every ordered group. [outcomes ** group_size, group_size]"""
    groups = _groups(len(rewards), group_size)
    advantages = group_advantages(
        rewards[groups].reshape(-1), group_size, scale=loss.scale, baseline=loss.advantage_baseline
    )
    return advantages.view(groups.shape)


def expected_advantages(advantages: Tensor, probs: Tensor) -> Tensor:
    """The advantage of each completion in the mean over the others of its group. [outcomes]"""
    groups = _groups(len(probs), advantages.shape[-1])
    others = probs[groups[:, 1:]].prod(-1)
    return torch.zeros_like(probs).index_add(0, groups[:, 0], others * advantages[:, 0])


@cache
def _groups(count: int, size: int) -> Tensor:
    """Every ordered group of completions. [count ** size, size]"""
    return torch.cartesian_prod(*[torch.arange(count)] * size).reshape(-1, size)


def _batch(outcomes: Outcomes, term: KLTerm) -> Batch:
    batch = Batch(
        policy_logprobs=outcomes.policy_logprobs,
        mask=outcomes.mask,
        advantages=torch.zeros(len(outcomes.probs), dtype=torch.float64),
        ref_logprobs=outcomes.ref_logprobs,
        sampler_logprobs=outcomes.sampler_logprobs,
    )
    if term.value != "exact":
        return batch
    rows = outcomes.policy_logits, outcomes.ref_logits
    return replace(batch, exact_kl=exact_kl(*rows), exact_kl_forward=exact_kl(*rows, direction="forward"))


def _mean_length(outcomes: Outcomes) -> float:
    return float((outcomes.probs * outcomes.mask.sum(-1)).sum())


def _describe(chain: Chain, world: World, price: float, *, stands: bool, updates: int) -> End:
    outcomes = enumerate_outcomes(chain, unreachable=True)
    ended, ref = outcomes.policy_logprobs.detach().sum(-1), outcomes.ref_logprobs.sum(-1)
    best, fitted = optimum(ref, world.rewards, price), fit_price(ended, ref, world.rewards)
    lengths, nearest = outcomes.mask.sum(-1).double(), optimum(ref, world.rewards, fitted)
    probs = ended.exp()
    return End(
        world=world.name,
        stands=stands,
        updates=updates,
        distance=_kl(ended, best),
        price=fitted,
        nearest=_kl(ended, nearest),
        kl=_kl(ended, ref),
        optimal_kl=_kl(best, ref),
        reward=float((probs * world.rewards).sum()),
        optimal_reward=float((best.exp() * world.rewards).sum()),
        length=float((probs * lengths).sum()),
        optimal_length=float((best.exp() * lengths).sum()),
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


def _kl(first: Tensor, second: Tensor) -> float:
    return float((first.exp() * (first - second)).sum())
