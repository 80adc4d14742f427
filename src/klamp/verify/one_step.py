"""Takes every step that a configuration can take in a small world, through klamp's own loss, and averages exactly.

A `Scene` is a chain with rewards and a group size. For each group of completions the step of a trainer is taken as
klamp takes it: the KL into the reward where it is placed there, advantages, `grpo_loss`. The KL's share of the step is
what the loss with beta has more than the loss with beta 0, per unit of beta: its expectation, its gradient and the
variance of both are exact.

    >>> from klamp.config import KLConfig
    >>> examine_config(KLConfig(kl_horizon="sequence"), scene=scene(0)).follows.in_words
    'KL(policy||ref)'
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.masking import Totals
from klamp.core.objective import Objective, grpo_loss
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import Gate, sequence_gate_kl, sequence_kl
from klamp.core.types import Batch, Reduction
from klamp.errors import ConfigError
from klamp.verify.gradient_names import Followed, name_gradient
from klamp.verify.oracle import Report, gradient_of, report, truths
from klamp.verify.worlds import Chain, Outcomes, Sampler, enumerate_outcomes, random_chain

Denominators: TypeAlias = Literal["group", "expected"]
Rewards: TypeAlias = Literal["equal", "mixed"]

MAX_GROUPS = 5_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A world in which steps are taken: a chain, a reward for each of its completions, a group size.

    Raises:
        ConfigError: too many groups to enumerate.
    """

    chain: Chain
    """The policy, its reference and its sampler."""
    rewards: Float[Tensor, " outcomes"] | None = None
    """Reward of each completion, in the order of `enumerate_outcomes`; None: all equal (saturated)."""
    group_size: int = 2
    """Completions per group; 1 only with the KL in the loss."""
    reference_length: float | None = None
    """Tokens that a per-token KL threshold is multiplied by; None: the longest completion."""
    denominators: Denominators = "group"
    """What means divide by: the group's own counts (the group is the batch), or the expected ones (it is a part of a
    large batch)."""

    def __post_init__(self) -> None:
        groups = math.comb(len(self.outcomes.probs) + self.group_size - 1, self.group_size)
        if groups > MAX_GROUPS:
            raise ConfigError(
                "this scene has too many groups to enumerate",
                got=f"{len(self.outcomes.probs)} completions in groups of {self.group_size}: {groups}",
                why=f"at most {MAX_GROUPS} are listed",
                fix="use a shorter chain, or groups of 2",
            )

    @functools.cached_property
    def outcomes(self) -> Outcomes:
        """Every completion that the sampler of this world can produce."""
        return enumerate_outcomes(self.chain)

    @functools.cached_property
    def before(self) -> Outcomes:
        """The same completions as the policy that drew them scored them, before its first update."""
        old = dataclasses.replace(self.chain, policy_logits=self.chain.logits("sampler"), sampler_logits=None)
        return enumerate_outcomes(old)

    @functools.cached_property
    def lengths(self) -> Float[Tensor, " outcomes"]:
        """The number of tokens of each completion."""
        return self.outcomes.mask.sum(-1).double()


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """What the KL of a configuration does in one scene, per unit of beta."""

    kl: Report
    """Value (the KL's part of the loss), gradient, their variances over groups, and how they match the truths."""
    follows: Followed
    """The known gradient that the expected gradient is a multiple of."""
    gate: float | None
    """Expected share of completions over the KL budget; None without a clip."""
    policy_gradient: Float[Tensor, "prefixes vocab"]
    """Expected gradient of the same step without the KL."""

    @property
    def share_of_sequence(self) -> float:
        """The multiple of the gradient of KL(policy||ref) that is nearest to the expected gradient: 1 is all."""
        return self.kl.matches["reverse"].projection


def scene(
    seed: int = 0,
    *,
    length: int = 3,
    vocab: int = 3,
    sampler: Sampler = "policy",
    rewards: Rewards = "equal",
    group_size: int = 2,
    denominators: Denominators = "group",
) -> Scene:
    """A random scene; with `mixed` rewards half of the completions get 1, the others 0."""
    chain = random_chain(seed, vocab=vocab, length=length, sampler=sampler)
    count = len(enumerate_outcomes(chain).probs)
    given = None if rewards == "equal" else (torch.arange(count) % 2).double()
    return Scene(chain=chain, rewards=given, group_size=group_size, denominators=denominators)


def examine_config(kl: KLConfig, loss: LossConfig | None = None, *, scene: Scene) -> StepReport:
    """Measures what the KL of a configuration does in a scene, exactly: every possible group is listed.

    Args:
        kl: the KL; at beta 0 it is nothing, and that is what comes out.
        loss: the policy loss around it; None: a plain sum over each completion, advantages against the mean of the
            others and not scaled, so that no reduction blurs what the term itself does.
        scene: the world.

    Raises:
        ConfigError: a combination that `build_objective` refuses; excluded tokens that the scene's chain does not have.
    """
    _check_exclusions(kl, scene.chain.vocab)
    loss, objective = _objective(kl, loss, scene)
    draws = _list_groups(scene)
    probs = torch.tensor([prob for _, prob in draws], dtype=torch.float64)
    steps = [_step(scene, objective, loss, kl, list(group)) for group, _ in draws]
    plain = [_step(scene, dataclasses.replace(objective, beta=0.0), loss, kl, list(group)) for group, _ in draws]
    unit = objective.beta or 1.0
    shares = torch.stack([(step.loss - bare.loss) / unit for step, bare in zip(steps, plain, strict=True)])
    found = report(scene.chain, probs, shares)
    gates = [step.gate for step in steps]
    return StepReport(
        kl=found,
        follows=name_gradient([found.gradient], [truths(scene.chain)]),
        gate=None if None in gates else float(sum(p * g for p, g in zip(probs.tolist(), gates, strict=True))),  # pyright: ignore
        policy_gradient=gradient_of((probs * torch.stack([bare.loss for bare in plain])).sum(), scene.chain),
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    loss: Tensor
    gate: float | None


_PLAIN_LOSS = LossConfig(
    loss_type="grpo", surrogate="score_function", scale_rewards="none", advantage_baseline="leave_one_out"
)


def _objective(kl: KLConfig, loss: LossConfig | None, scene: Scene) -> tuple[LossConfig, Objective]:
    if loss is not None:
        return loss, build_objective(kl, loss, max_length=scene.chain.length)
    plain: Reduction = "sequence_sum"
    objective = build_objective(kl, _PLAIN_LOSS, max_length=scene.chain.length)
    return _PLAIN_LOSS, dataclasses.replace(
        objective, reduction=plain, kl=dataclasses.replace(objective.kl, normalizer=plain)
    )


def _list_groups(scene: Scene) -> list[tuple[tuple[int, ...], float]]:
    """Every group of completions that can be drawn (in any order), and its probability."""
    probs = scene.outcomes.probs.tolist()
    groups: list[tuple[tuple[int, ...], float]] = []
    for group in itertools.combinations_with_replacement(range(len(probs)), scene.group_size):
        orders = math.factorial(scene.group_size)
        for count in Counter(group).values():
            orders //= math.factorial(count)
        groups.append((group, orders * math.prod(probs[i] for i in group)))
    return groups


def _step(scene: Scene, objective: Objective, loss: LossConfig, kl: KLConfig, group: list[int]) -> _Step:
    """The loss of one group, as a trainer forms it: the gate and the advantages before the update, then the loss."""
    batch = _batch(scene, scene.outcomes, objective, kl, group)
    before = _batch(scene, scene.before, objective, kl, group)
    if objective.beta > 0 and objective.kl.clip_method != "none":
        gate_kl = _gate_kl(scene, before, objective, kl)
        batch, before = (dataclasses.replace(each, gate_kl=gate_kl) for each in (batch, before))
    advantages = _advantages(scene, objective, loss, before, group)
    output = grpo_loss(
        dataclasses.replace(batch, advantages=advantages),
        objective,
        totals=None if scene.denominators == "group" else _totals(scene, kl),
    )
    over = output.metrics.get("kl/over_budget")
    return _Step(loss=output.loss, gate=None if over is None else over.item())


def _batch(scene: Scene, scored: Outcomes, objective: Objective, kl: KLConfig, group: list[int]) -> Batch:
    """A batch of the chosen completions; its advantages are still 0."""
    y = Outcomes(*(field[group] for field in scored))
    exact = objective.beta > 0 and objective.kl.value == "exact"
    return Batch(
        policy_logprobs=y.policy_logprobs,
        mask=y.mask,
        kl_mask=_kl_mask(kl, y) if kl.excludes else None,
        advantages=torch.zeros(len(group), dtype=torch.float64),
        old_logprobs=y.sampler_logprobs,
        ref_logprobs=y.ref_logprobs,
        sampler_logprobs=y.sampler_logprobs,
        exact_kl=exact_kl(y.policy_logits, y.ref_logits) if exact else None,
        exact_kl_forward=exact_kl(y.policy_logits, y.ref_logits, direction="forward") if exact else None,
        reference_length=scene.reference_length or float(kl.kl_reference_length or scene.chain.length),
        group_size=scene.group_size,
    )


def _gate_kl(scene: Scene, before: Batch, objective: Objective, kl: KLConfig) -> Tensor:
    """The KL that gates the clip, in nats per completion; the mean of a large batch is the expected KL."""
    if scene.denominators == "group" or objective.kl.clip_level != "batch":
        return sequence_gate_kl(before, objective.kl)
    everyone = _batch(scene, scene.before, objective, kl, list(range(len(scene.outcomes.probs))))
    each = sequence_kl(everyone, objective.kl)
    return (scene.outcomes.probs * each).sum().expand(len(before.mask))


def _check_exclusions(kl: KLConfig, vocab: int) -> None:
    """Refuse excluded tokens that this world does not have."""
    unknown = [name for name in kl.kl_exclude_tokens if not isinstance(name, int) or not 0 <= name < vocab]
    if not unknown and not kl.kl_exclude_between:
        return
    got = f"kl_exclude_tokens={unknown}" if unknown else f"kl_exclude_between={kl.kl_exclude_between}"
    raise ConfigError(
        "this world cannot tell which tokens carry no KL",
        got=got,
        why=f"its tokens are the numbers 0 to {vocab - 1}, without text; ignored, another KL would be examined",
        fix="use numbers of this world in kl_exclude_tokens, or kl_exclude_prefix; or leave these fields out",
    )


def _kl_mask(kl: KLConfig, y: Outcomes) -> Tensor:
    excluded = torch.tensor([token for token in kl.kl_exclude_tokens if isinstance(token, int)])
    return y.mask & ~torch.isin(y.tokens, excluded) & (torch.arange(y.mask.shape[1]) >= kl.kl_exclude_prefix)


def _totals(scene: Scene, kl: KLConfig) -> Totals:
    """The expected numbers of sequences, tokens and KL tokens of a group."""
    y, size = scene.outcomes, float(scene.group_size)
    tokens = (y.probs * scene.lengths).sum().item()
    kl_tokens = (y.probs * _kl_mask(kl, y).sum(-1)).sum().item()
    return Totals(size, size * tokens, size * kl_tokens)


def _advantages(scene: Scene, objective: Objective, loss: LossConfig, before: Batch, group: list[int]) -> Tensor:
    rewards = torch.zeros(len(group), dtype=torch.float64) if scene.rewards is None else scene.rewards[group]

    def advantages(rewards: Tensor) -> Tensor:
        if scene.group_size == 1:
            return rewards
        return group_advantages(rewards, scene.group_size, scale=loss.scale, baseline=loss.advantage_baseline)

    if objective.beta == 0 or objective.kl.placement != "reward":
        return advantages(rewards)
    gate, beta = Gate.of(before, objective.kl), objective.beta
    return advantages_with_kl(rewards, before, objective.kl, beta=beta, gate=gate, advantages=advantages)
