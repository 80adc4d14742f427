"""Checks of the gradients: which divergence each penalty follows, at one position, over completions and in whole steps,
with the KL in the reward or the advantage, under clips and budgets; and of the controllers of beta.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.loss import configured_price
from klamp.core.advantages import Baseline, group_advantages
from klamp.core.clipping import clip_gate, clip_kl, kl_budget
from klamp.core.controllers import ProportionalController, StepController
from klamp.core.estimators import ESTIMATORS, kl_estimate
from klamp.core.gradients import exact_penalty, kl_penalty, log_weights
from klamp.core.penalty import shifted_advantages
from klamp.core.term import KLTerm, measure
from klamp.core.types import Batch, Gradient, Horizon
from klamp.errors import ConfigError, NonFiniteError
from klamp.verify.judge import exact
from klamp.verify.one_step import Rewards, Scene, examine_config, scene
from klamp.verify.oracle import NOTHING_KNOWN, Loss, Truths, expected_gradient, gradient_of, in_reward, truths
from klamp.verify.proofs.check import Check, follows, is_equal, is_true
from klamp.verify.worlds import Chain, Outcomes, Sampler, one_position, prefix_probs, random_chain, random_positions

Claim = tuple[str, str, Sampler, *tuple[Loss, ...]]
"""What losses follow: words, the name of the known gradient, who sampled, the losses."""
POSITION: dict[str, Any] = {"vocab": 4, "length": 1, "eos": None}
COMPLETIONS: dict[str, Any] = {"vocab": 3, "length": 3}


def prove_gradients() -> list[Check]:
    """Checks the gradients of `kl_penalty` at one position, for tokens of the policy and of another sampler."""
    rows: list[Claim] = []
    for name, row in ESTIMATORS.items():
        own = row.gradient_as_loss.removesuffix(" KL")
        rows.append((f"{name} as a loss (its own gradient)", own, "policy", penalty(name, "own")))
    followed: dict[Gradient, str] = {"reverse": "reverse", "forward": "forward", "none": "zero"}
    sampled: dict[Sampler, str] = {"policy": "tokens of the policy", "other": "tokens of another sampler, weighted"}
    for (sampler, where), (gradient, name) in itertools.product(sampled.items(), followed.items()):
        losses = [penalty(value, gradient, sampler=sampler) for value in ESTIMATORS]
        rows.append((f"gradient {gradient}, whichever the value; {where}", name, sampler, *losses))
    return list(_follow(rows, POSITION))


def prove_formulas() -> list[Check]:
    """Checks the gradients of plain formulas, differentiated as written, without klamp."""
    rows: list[Claim] = [
        ("k1 as a loss, tokens of the policy", "zero", "policy", lambda y: y.log_ratio),
        ("k1 as a loss, tokens of another sampler", NOTHING_KNOWN, "other", lambda y: y.log_ratio),
        ("w k1 differentiated", "reverse", "other", lambda y: y.weight * y.log_ratio),
        ("sg(w) k2", "reverse", "other", lambda y: y.weight.detach() * _k2(y)),
        ("w k2 differentiated: follows E[k2]", "E[k2]", "other", lambda y: y.weight * _k2(y)),
        ("w k3 differentiated (DeepSeek-V3.2, RPG)", "reverse", "other", lambda y: y.weight * printed_k3(y)),
        ("sg(w) k3", "forward", "other", lambda y: y.weight.detach() * printed_k3(y)),
        ("k1 in the reward", "reverse", "policy", in_reward(lambda y: y.log_ratio)),
        ("k3 in the reward", "reverse - forward", "policy", in_reward(printed_k3)),
        ("k2 in the reward", NOTHING_KNOWN, "policy", in_reward(_k2)),
    ]
    policy, direction = (chain.policy_logits.detach()[0] for chain in random_positions(2, vocab=4))
    near = one_position(policy, policy + 0.02 * direction)
    size = (expected_gradient(near, in_reward(printed_k3)).norm() / truths(near)["reverse"].norm()).item()
    text = f"{100 * size:.2g} % of the gradient of KL(policy||ref)"
    return [
        *_follow(rows, POSITION),
        is_true("k3 in the reward, near the reference: cancels", size < 0.05, text, expected="below 5 %"),
    ]


def penalty(value: str, gradient: Gradient, horizon: Horizon = "token", *, sampler: Sampler = "policy") -> Loss:
    """klamp's penalty as a loss of enumerated completions, of an estimator or `exact`."""

    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        choices: Any = {"gradient": gradient, "horizon": horizon}
        if value == "exact":
            log_w = log_weights(y.policy_logprobs, behavior, y.mask, horizon="sequence")
            return exact_penalty(y.policy_logprobs, exact(y), log_w, y.mask, **choices)
        choices |= {"value": value, "behavior_logprobs": behavior}
        return kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, **choices)

    return loss


def _follow(rows: Iterable[Claim], sizes: Mapping[str, Any]) -> Iterator[Check]:
    """Checks what losses follow, each in two worlds of these sizes."""
    for claim, name, sampler, *losses in rows:
        chains = [random_chain(seed, sampler=sampler, **sizes) for seed in (0, 1)]
        gradients = [expected_gradient(chain, loss) for loss in losses for chain in chains]
        yield follows(claim, gradients, [_known(chain) for chain in chains] * len(losses), name)


def _known(chain: Chain) -> Truths:
    """The known gradients, E[k2]'s and the L1 distance's among them, prefixes held fixed."""
    log_p, log_q = chain.logprobs("policy"), chain.logprobs("ref")
    rows = {"E[k2]": log_p.exp() * (log_p - log_q) ** 2 / 2, "L1 distance": (log_p.exp() - log_q.exp()).abs()}
    reached = prefix_probs(chain, "policy").detach()
    return truths(chain) | {name: gradient_of(reached @ terms.sum(-1), chain) for name, terms in rows.items()}


def _k2(y: Outcomes) -> Tensor:
    return y.log_ratio**2 / 2


def printed_k3(y: Outcomes) -> Tensor:
    """The k3 formula as TRL and others print it, written out."""
    return (-y.log_ratio).exp() - 1 + y.log_ratio


def prove_sequences() -> list[Check]:
    """Checks `kl_penalty` and the exact KL on short chains with an end token."""
    rows: list[Claim] = [
        ("horizon token, value k2", "local", "policy", penalty("k2", "reverse", "token")),
        ("horizon token, value k3", "local", "policy", penalty("k3", "reverse", "token")),
        ("horizon token, exact", "local", "policy", penalty("exact", "reverse", "token")),
        ("horizon token, gradient forward", "local_forward", "policy", penalty("k3", "forward", "token")),
        ("off-policy, token ratio", "local_sampled", "other", penalty("k3", "reverse", "token", sampler="other")),
    ]
    whole: dict[Sampler, str] = {"policy": "horizon sequence", "other": "off-policy, prefix ratio"}
    for sampler, where in whole.items():
        more: list[Claim] = [
            (f"{where}, value k1", "reverse", sampler, penalty("k1", "reverse", "sequence", sampler=sampler)),
            (f"{where}, value k3", "reverse", sampler, penalty("k3", "reverse", "sequence", sampler=sampler)),
            (f"{where}, exact", "reverse", sampler, penalty("exact", "reverse", "sequence", sampler=sampler)),
            (f"{where}, gradient forward", "forward", sampler, penalty("k3", "forward", "sequence", sampler=sampler)),
        ]
        rows.extend(more)
    return list(_follow(rows, COMPLETIONS))


def prove_sequence_formulas() -> list[Check]:
    """Checks formulas of whole completions, differentiated as written, without klamp."""
    rows: list[Claim] = [
        ("half the square of the summed log-ratio", "reverse", "policy", lambda y: y.log_ratio.sum(-1) ** 2 / 2),
        ("k1 reward-to-go (FRPO)", "reverse", "policy", lambda y: _to_go(y.log_ratio).detach() * y.policy_logprobs),
        (
            "prefix-product ratio times k3, differentiated",
            "reverse",
            "other",
            lambda y: _prefix_ratio(y) * printed_k3(y),
        ),
        ("token ratio times k3, differentiated", "local_sampled", "other", lambda y: y.weight * printed_k3(y)),
        ("geometric-mean ratio times k3 (GSPO's)", NOTHING_KNOWN, "other", lambda y: _mean_ratio(y) * printed_k3(y)),
        ("k1 as a loss, over the sequence", "zero", "policy", lambda y: y.log_ratio),
    ]
    return list(_follow(rows, COMPLETIONS))


def _to_go(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _prefix_ratio(y: Outcomes) -> Tensor:
    return y.weight.log().cumsum(-1).exp()


def _mean_ratio(y: Outcomes) -> Tensor:
    return (y.weight.log().sum(-1, keepdim=True) / y.mask.sum(-1, keepdim=True)).exp()


IN_REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
REWARD = KLConfig(**IN_REWARD)
TO_GO = KLConfig(kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")


def prove_placement() -> list[Check]:
    """Checks every place of the KL through a whole step, with groups of two, saturated and mixed."""
    return [*_places(), *_saturated(), *_lengths(), *_prices()]


def _places() -> Iterator[Check]:
    dr_grpo = LossConfig(advantage_baseline="mean")
    rows = (
        ("in the reward, against the mean of the others", REWARD, None, "reverse", 1.0),
        ("in the advantage, reward-to-go", TO_GO, None, "reverse", 1.0),
        ("in the advantage, token by token", replace(TO_GO, kl_horizon="token"), None, "local", 1.0),
        # dr_grpo divides by the longest length (2), the group's mean holds a completion's own KL: (2 - 1)/2.
        ("in the reward, against the group's mean of 2, dr_grpo", REWARD, dr_grpo, "reverse", 0.25),
    )
    kinds: dict[Rewards, str] = {"equal": "saturated groups", "mixed": "mixed groups"}
    for (claim, kl, loss, name, factor), (rewards, kind) in itertools.product(rows, kinds.items()):
        world = scene(0, length=2, rewards=rewards)
        gradient = examine_config(kl, loss, scene=world).kl.gradient
        yield follows(f"{claim}; {kind}", [gradient], [truths(world.chain)], name, factor=factor)


def _saturated() -> list[Check]:
    """Checks groups of equal rewards: division by the group's std makes beta drop out of a KL in the reward."""
    spent = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    rewards = torch.ones(4, dtype=torch.float64)
    small, large = (group_advantages(rewards - beta * spent, 4, scale="std", eps=0.0) for beta in (0.01, 1.0))
    world, scaled = scene(0, length=2), LossConfig(scale_rewards="std")
    steps = {beta: examine_config(replace(TO_GO, beta=beta), scaled, scene=world) for beta in (0.01, 1.0)}
    weak, strong = (beta * step.kl.gradient.norm() for beta, step in steps.items())
    noise = torch.full((4,), 0.1, dtype=torch.float64)
    std, after = "in the reward, divided by the std", "in the advantage, after the division"
    return [
        is_equal(f"{std}: 100 times beta gives the same advantages", (large - small).abs().max(), 0.0),
        _refuses("that", lambda: build_objective(REWARD, scaled, max_length=1)),
        is_equal(f"{after}: 100 times beta is 100 times the pull", strong / weak, 100.0),
        is_equal("a group whose rewards are all equal", group_advantages(noise, 4, scale="std").abs().max(), 0.0),
    ]


def _lengths() -> list[Check]:
    """Checks what length does to the same KL, spread over a short and over a long completion of equal reward."""
    mask = torch.tensor([[True] * 2 + [False] * 8, [True] * 10])
    delta = torch.where(mask, 1.0 / mask.sum(-1, keepdim=True).double(), 0.0)
    means = delta.sum(-1) / mask.sum(-1)
    by_mean = group_advantages(1 - 0.1 * means, 2, scale="std")
    by_sum = group_advantages(1 - 0.1 * delta.sum(-1), 2, scale="none")
    text = f"advantages {by_mean[0].item():+.3f} (2 tokens), {by_mean[1].item():+.3f} (10 tokens)"
    zero = torch.zeros_like(delta)
    batch = Batch(policy_logprobs=delta, ref_logprobs=zero, mask=mask, advantages=zero)
    shifted = shifted_advantages(zero, measure(batch, KLTerm(horizon="sequence")), beta=0.1)
    return [
        is_true(
            "a mean over the own length in the reward: the longest completion wins", by_mean[1] > 0 > by_mean[0], text
        ),
        is_equal("a sum over the completion: equal nats, equal advantages", (by_sum[1] - by_sum[0]).abs(), 0.0),
        is_equal("in the advantage: equal nats, equal shift of the first token", shifted[0, 0] - shifted[1, 0], 0.0),
    ]


def _prices() -> Iterator[Check]:
    """Checks what a nat of a whole completion costs in reward, from the two halves of the expected update.

    The half without a KL is -a grad E[reward], the half of the KL is b grad KL(policy||ref): the price is b / a.
    """
    k3 = KLConfig(beta=0.1, kl_horizon="sequence")
    k1 = replace(k3, kl_estimator="k1")
    terms = {
        "loss, k3": k3,
        "loss, k1": k1,
        "advantage, k1": replace(k1, kl_placement="advantage"),
        "reward, k1": replace(k1, kl_placement="reward"),
        "loss, k3, a sum beside a fixed length": replace(k3, kl_normalizer="sequence_sum"),
        "loss, k3, a token mean beside a fixed length": replace(k3, kl_normalizer="token_mean"),
    }
    world = scene(0, length=2, rewards="mixed", group_size=3)
    reward = gradient_of((world.outcomes.policy_logprobs.sum(-1).exp() * world.rewards).sum(), world.chain)
    reverse = truths(world.chain)["reverse"]
    for (name, kl), baseline in itertools.product(terms.items(), get_args(Baseline)):
        loss = LossConfig(loss_type="dr_grpo", advantage_baseline=baseline)
        price = configured_price(kl, loss, group_size=3, mean_length=world.mean_length, max_length=2).per_completion
        step = examine_config(kl, loss, scene=world)
        earned, paid = _multiple(-step.policy_gradient, reward), _multiple(kl.beta * step.kl.gradient, reverse)
        claim = f"{name}; {baseline} of 3: {price:.4g} reward per nat of a completion at beta {kl.beta:g}"
        yield is_equal(claim, paid / earned, price)


def _multiple(gradient: Tensor, of: Tensor) -> Tensor:
    return (gradient * of).sum() / of.square().sum()


def prove_clipping() -> list[Check]:
    """Checks clips, gates and budgets against the numbers that they should give."""
    budget = kl_budget(0.1, per_token=True, reference_length=50)
    kl = torch.tensor([2.0, 8.0], dtype=torch.float64)
    hard = clip_kl(kl, 5.0, method="hard")
    soft, softplus = clip_kl(kl, 5.0, method="soft"), math.log1p(math.exp(-3)) + math.log1p(math.exp(3))
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    leak = clip_gate(0.05 + 0.5 * torch.special.ndtri(quantiles), 0.1, method="hard").mean()
    wide = clip_gate(torch.tensor([0.0, 0.1], dtype=torch.float64), 0.05, method="soft")
    return [
        is_equal("0.1 nats per token x 50 tokens", budget, 5.0),
        is_equal("hard: max(0, 2 - 5) + max(0, 8 - 5)", hard.sum(), 3.0),
        is_equal("soft: softplus(2 - 5) + softplus(8 - 5)", soft.sum(), softplus),
        is_equal("hard: slope below and above, by autograd", _slope("hard", 2.0) + 10 * _slope("hard", 8.0), 10.0),
        is_equal("soft: slope sigmoid(8 - 5), by autograd", _slope("soft", 8.0), 1 / (1 + math.exp(-3))),
        is_equal("soft, temperature 1, per-token units: gate at KL 0, threshold .05", wide[0], 0.4875, tolerance=5e-5),
        is_equal("the same at KL .1: half of beta everywhere, no clip", wide[1], 0.5125, tolerance=5e-5),
        is_equal("relu of one noisy KL (.05 +- .5, threshold .1): open", leak, 0.46, tolerance=5e-4),
        *_gated(),
        _refuses("a clipped k1-as-loss", lambda: KLConfig(kl_estimator="k1", kl_gradient="own", kl_clip_method="hard")),
    ]


def _slope(method: str, kl: float) -> float:
    x = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(clip_kl(x, 5.0, method=method), x)  # pyright: ignore[reportArgumentType]
    return slope.item()


def _gated() -> Iterator[Check]:
    """Checks the clip inside a whole step: gated by the exact KL, and by sampled KLs of the other one of two."""
    world = scene(0, length=2)

    def gradient(threshold: float, world: Scene = world, **choices: Any) -> Tensor:
        clip = {"kl_clip_method": "hard", "kl_clip_threshold": threshold, "use_per_token_kl_threshold": False}
        return examine_config(KLConfig(**clip | choices), scene=world).kl.gradient

    exact: dict[str, Any] = {"kl_estimator": "exact"}
    soft = exact | {"kl_clip_method": "soft", "kl_clip_temperature": 1e-4}
    for claim, pull, name in (
        ("hard clip at 0: no clip", gradient(0.0, **exact), "local"),
        ("hard clip at 1,000 nats: no pull", gradient(1000.0, **exact), "zero"),
        ("soft clip far below the KL: no clip", gradient(1e-3, **soft), "local"),
        ("in the reward, hard clip at 0: no clip", gradient(0.0, **IN_REWARD), "reverse"),
        ("in the reward, hard clip at 1,000 nats: no pull", gradient(1000.0, **IN_REWARD), "zero"),
    ):
        yield follows(claim, [pull], [truths(world.chain)], name)
    two = scene(1, length=2)
    k3 = kl_estimate(two.outcomes.policy_logprobs, two.outcomes.ref_logprobs, estimator="k3").sum(-1).detach()
    over = float(two.outcomes.probs[k3 > 0.3].sum())  # how often the other one is over budget
    for place, choices, name in (("in the loss, k3", {}, "local"), ("in the reward, k1", IN_REWARD, "reverse")):
        claim = f"{place}, hard clip at .3 nats: gated by the other of two"
        yield follows(claim, [gradient(0.3, two, **choices)], [truths(two.chain)], name, factor=over)


def prove_controllers() -> list[Check]:
    """Checks what each controller does to beta (step, PPO's, Ziegler's) and refuses."""
    step = [StepController(0.01, target=0.05).update(kl) for kl in (0.08, 0.05, 0.02)]
    ppo = [StepController(1.0, target=0.1, up=2, down=0.5, high=1.5, low=1 / 1.5).update(kl) for kl in (0.2, 0.06)]
    ziegler = ProportionalController(0.2, target=6.0, horizon=10_000)
    return [
        is_equal("step: KL above 1.5 targets", step[0], 0.01 * 1.5),
        is_equal("step: KL on target", step[1], 0.01),
        is_equal("step: KL below half a target", step[2], 0.01 * 0.75),
        is_equal("PPO's rule: doubles above 1.5 targets", ppo[0], 2.0),
        is_equal("PPO's rule: halves below a target / 1.5", ppo[1], 0.5),
        is_equal("proportional: x (1 + 0.2 n / horizon), saturated", ziegler.update(60.0, 256), 0.2 * 1.00512),
        _refuses("proportional: more steps than the horizon", lambda: ziegler.update(6.0, 20_000)),
        _refuses("a KL of NaN", lambda: ziegler.update(math.nan)),
        _refuses("a negative KL (a mean of k1)", lambda: ziegler.update(-0.1)),
    ]


def _refuses(claim: str, act: object) -> Check:
    try:
        result = act()  # pyright: ignore
    except (ConfigError, NonFiniteError) as error:
        return is_true(f"{claim} is refused", True, error.what, expected="refused")
    return is_true(f"{claim} is refused", False, f"accepted: {result}", expected="refused")
