"""Takes every step that a configuration can take in a small world, through klamp's own loss, and averages exactly.

A `Scene` is a chain with rewards and a group size. For each group of completions the step of a trainer is taken as
klamp takes it: the KL into the reward where it is placed there, advantages, `grpo_loss`. The KL's share of the step is
what the loss with beta has more than the loss with beta 0, per unit of beta: its expectation, its gradient and the
variance of both are exact.

    >>> from klamp.config import KLConfig
    >>> examine_config(KLConfig(kl_horizon="sequence"), scene=scene(0)).kl.follows.in_words
    'KL(policy||ref)'
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.teacher import TeacherConfig
from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.masking import Totals
from klamp.core.objective import LossOutput, Objective, grpo_loss
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import KLTerm, Prepared, Weighted, measure, prepare, sequence_gate_kl, sequence_kl
from klamp.core.topk import distinct, topk_kl
from klamp.core.types import HELD, Batch, Scored
from klamp.errors import ConfigError, KLWarning
from klamp.verify.oracle import Report, gradient_of, report
from klamp.verify.worlds import Chain, Outcomes, Sampler, enumerate_outcomes, random_chain

Built = TypeVar("Built")
Rewards: TypeAlias = Literal["equal", "mixed"]

MAX_GROUPS = 10_000
NO_KL = KLConfig(beta=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A world in which steps are taken: a chain, a reward for each of its completions, a group size.

    Means divide by the expected numbers of completions and tokens of a group, as in a large batch.

    Raises:
        ConfigError: too many groups to enumerate.
    """

    chain: Chain
    """The policy, its reference, its teacher and its sampler."""
    rewards: Float[Tensor, " outcomes"] = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    """Reward of each completion, in the order of `enumerate_outcomes`; a single one: all equal (saturated)."""
    group_size: int = 2
    """Completions per group; 1 only with the KL in the loss."""
    whole_batch: bool = False
    """Whether the mean KL of the group itself decides a clip of level `batch`; else the expected KL does."""

    def __post_init__(self) -> None:
        count = len(self.outcomes.probs)
        groups = math.comb(count + self.group_size - 1, self.group_size)
        if groups > MAX_GROUPS:
            got = f"{count} completions in groups of {self.group_size}: {groups}"
            why, fix = f"at most {MAX_GROUPS} are listed", "use a shorter chain, or groups of 2"
            raise ConfigError("this scene has too many groups to enumerate", got=got, why=why, fix=fix)
        object.__setattr__(self, "rewards", self.rewards.expand(count))

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
    def groups(self) -> tuple[Int[Tensor, "groups size"], Float[Tensor, " groups"]]:
        """The completions of every group that can be drawn, in any order, and how likely each group is."""
        rows, orders = _list_groups(len(self.outcomes.probs), self.group_size)
        return rows, orders * self.outcomes.probs[rows].prod(-1)

    @property
    def mean_length(self) -> float:
        """The expected number of tokens of a completion."""
        return float((self.outcomes.probs * self.outcomes.mask.sum(-1)).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """What the KL of a configuration does in one scene, per unit of its coefficient."""

    kl: Report
    """Value (the KL's part of the loss), gradient, their variances over groups, and which known gradient it follows."""
    gate: float | None
    """Expected share of completions over the KL budget; None without a clip."""
    policy_gradient: Float[Tensor, "prefixes vocab"]
    """Expected gradient of the same step without the KL."""


def scene(
    seed: int = 0,
    *,
    length: int = 3,
    vocab: int = 3,
    sampler: Sampler = "policy",
    rewards: Rewards = "equal",
    group_size: int = 2,
) -> Scene:
    """A random scene; with `mixed` rewards half of the completions get 1, the others 0."""
    chain = random_chain(seed, vocab=vocab, length=length, sampler=sampler)
    count = len(enumerate_outcomes(chain).probs)
    values = torch.arange(count) % 2 if rewards == "mixed" else torch.zeros(1)
    return Scene(chain=chain, rewards=values.double(), group_size=group_size)


def examine_config(
    kl: KLConfig, loss: LossConfig | None = None, *, scene: Scene, teacher: TeacherConfig | None = None
) -> StepReport:
    """Measures what the KL of a configuration does in a scene, exactly: every possible group is listed.

    Args:
        kl: the KL; at beta 0 it is nothing, and that is what comes out.
        loss: the policy loss around it; None: a plain sum over each completion, advantages against the mean of the
            others and not scaled, so that no reduction blurs what the term itself does.
        scene: the world.
        teacher: the second anchor; then it is the KL to that which is measured, beside the other.

    Raises:
        ConfigError: a combination that `build_objective` refuses; excluded tokens that the scene's chain does not have.
    """
    _check_exclusions(kl, scene.chain.vocab)
    objective = build_objective(kl, loss or _PLAIN_LOSS, max_length=scene.chain.length, teacher=teacher)
    if loss is None:
        loss, objective = _PLAIN_LOSS, _plain(objective)
    _, probs = scene.groups
    losses, gates = _take_steps(scene, objective, loss, kl, teacher)
    coefficient, without = (objective.beta, ()) if teacher is None else (teacher.teacher_coef, objective.terms[:1])
    plain, _ = _take_steps(scene, dataclasses.replace(objective, terms=without), loss, kl)
    anchor = "ref" if teacher is None else "teacher"
    return StepReport(
        kl=report(scene.chain, probs, (losses - plain) / (coefficient or 1.0), anchor=anchor),
        gate=None if gates is None else float((probs * gates).sum()),
        policy_gradient=gradient_of((probs * plain).sum(), scene.chain),
    )


def _plain(objective: Objective) -> Objective:
    """The objective as a plain sum over each completion, its KL terms included."""
    (beta, term), *others = objective.terms
    terms = (Weighted(beta, dataclasses.replace(term, normalizer="sequence_sum")), *others)
    return dataclasses.replace(objective, reduction="sequence_sum", terms=terms)


_PLAIN_LOSS = LossConfig(surrogate="score_function")


def scores_of(
    scored: Outcomes, objective: Objective, kl: KLConfig, teacher: TeacherConfig | None = None
) -> dict[str, Tensor]:
    """What a batch holds of every completion; at beta 0 no reference. [outcomes, tokens]

    Named as the fields of `Batch`, and ANCHOR.FIELD for the fields of an anchor's `Scored`.
    """
    scores = {
        "policy_logprobs": scored.policy_logprobs,
        "mask": scored.mask,
        "old_logprobs": scored.sampler_logprobs,
        "sampler.logprobs": scored.sampler_logprobs,
    }
    anchors = {term.anchor: term for _, term in objective.terms}
    if "teacher" in anchors:
        scores["teacher.logprobs"] = scored.teacher_logprobs
        if teacher is not None and (anchors["teacher"].of_prefixes or teacher.teacher_baseline != "none"):
            scores["teacher.kl"] = teacher_kl(scored, teacher)
    if objective.beta == 0:
        return scores
    scores["reference.logprobs"] = scored.ref_logprobs
    if kl.excludes:
        scores |= dict.fromkeys(("reference.mask", "sampler.mask"), _kl_mask(kl, scored))
    term = anchors.get("reference", KLTerm())
    if "exact" in (term.value, term.baseline):
        models = scored.policy_logits, scored.ref_logits
        scores |= {"reference.kl": exact_kl(*models), "reference.forward_kl": exact_kl(*models, direction="forward")}
    return scores


def batch_of(scores: Mapping[str, Tensor], **options: Any) -> Batch:
    """The batch that the scores of `scores_of` make."""
    anchors: dict[str, dict[str, Tensor]] = {}
    for name, x in scores.items():
        anchor, dot, field = name.partition(".")
        if dot:
            anchors.setdefault(anchor, {})[field] = x
    own = {name: x for name, x in scores.items() if "." not in name}
    return Batch(**own, anchors={name: Scored(**fields) for name, fields in anchors.items()}, **options)


def teacher_kl(y: Outcomes, teacher: TeacherConfig) -> Float[Tensor, "outcomes tokens"]:
    """The KL to the teacher at each sampled prefix, over the vocabulary or a head, with gradient to the chain."""
    direction = teacher.teacher_direction
    if "exact" in (teacher.teacher_estimator, teacher.teacher_baseline):
        return exact_kl(y.policy_logits, y.teacher_logits, direction=direction)
    policy, other = (logits.log_softmax(-1) for logits in (y.policy_logits, y.teacher_logits))
    size = min(teacher.teacher_top_k, policy.shape[-1])
    heads = {"student": (policy,), "teacher": (other,), "union": (policy, other)}[teacher.teacher_head]
    ids = torch.cat([logprobs.detach().topk(size).indices for logprobs in heads], -1)
    return topk_kl(
        policy.gather(-1, ids),
        other.gather(-1, ids),
        y.policy_logprobs,
        y.teacher_logprobs,
        (ids != y.tokens[..., None]).all(-1),
        direction=direction,
        tail=teacher.teacher_tail if teacher.teacher_estimator == "topk" else "bucket",
        log_weight=None if teacher.teacher_off_policy == "none" else y.policy_logprobs - y.sampler_logprobs,
        kept=distinct(ids, torch.ones_like(ids, dtype=torch.bool)),
    )


def _take_steps(
    scene: Scene, objective: Objective, loss: LossConfig, kl: KLConfig, teacher: TeacherConfig | None = None
) -> tuple[Float[Tensor, " groups"], Float[Tensor, " groups"] | None]:
    """The loss of every group, with gradient to the chain, and its share over the budget, if a budget is set.

    As a trainer forms it: the gate and the advantages before the update, then the loss. Tensors with a gradient are
    cut off the chain, so that one backward pass leaves each group's gradient in its own rows, and then joined again.
    """
    rows, _ = scene.groups
    scores = {name: x[rows] for name, x in scores_of(scene.outcomes, objective, kl, teacher).items()}
    attached = {name: x for name, x in scores.items() if x.requires_grad}
    leaves = {name: x.detach().requires_grad_() for name, x in attached.items()}
    gates = None
    if objective.beta > 0 and objective.terms[0].term.clip_method != "none":
        gates = _gates(scene, objective, kl)
    advantages = _advantages(scene, objective, loss, kl, gates)
    y, size = scene.outcomes, float(scene.group_size)
    kl_tokens = (y.probs * _kl_mask(kl, y).sum(-1)).sum().item() or 1.0  # 1: none carries a KL
    totals = Totals(size, size * scene.mean_length, size * kl_tokens)
    outputs: list[LossOutput] = []
    for index in range(len(rows)):
        group = {name: x[index] for name, x in (scores | leaves).items()}
        gate = None if gates is None else gates[index]
        batch = _batch(scene, kl, group, advantages=advantages[index], gate=gate)
        outputs.append(grpo_loss(batch, objective, totals=totals))
    whole = torch.stack([output.loss for output in outputs]).sum()
    slopes = torch.autograd.grad(whole, list(leaves.values()), retain_graph=True, materialize_grads=True)
    linear = [(g * (x - x.detach())).flatten(1).sum(-1) for g, x in zip(slopes, attached.values(), strict=True)]
    losses = torch.stack([output.loss.detach() for output in outputs]) + torch.stack(linear).sum(0)
    return losses, None if gates is None else torch.stack([output.metrics["kl/over_budget"] for output in outputs])


def _batch(
    scene: Scene, kl: KLConfig, scores: dict[str, Tensor], *, advantages: Tensor, gate: Tensor | None = None
) -> Batch:
    if gate is not None:
        scores = scores | {f"{anchor}.gate": gate for anchor in HELD if f"{anchor}.logprobs" in scores}
    length = float(kl.kl_reference_length or scene.chain.length)
    return batch_of(scores, advantages=advantages, reference_length=length, group_size=scene.group_size)


def _before(scene: Scene, objective: Objective, kl: KLConfig, rows: Tensor, gate: Tensor | None = None) -> Batch:
    """The chosen completions as the policy that drew them scored them, before its first update."""
    scores = {name: x[rows] for name, x in scores_of(scene.before, objective, kl).items()}
    return _batch(scene, kl, scores, advantages=torch.zeros(len(rows), dtype=torch.float64), gate=gate)


def _gates(scene: Scene, objective: Objective, kl: KLConfig) -> Float[Tensor, "groups size"]:
    """The KL that gates the clip, in nats per completion; the mean of a large batch is the expected KL."""
    (rows, _), term = scene.groups, objective.terms[0].term

    def before(chosen: Tensor) -> Prepared:
        return measure(_before(scene, objective, kl, chosen), term)

    if term.clip_level != "batch":
        return sequence_gate_kl(before(rows.flatten())).view(rows.shape)
    if scene.whole_batch:
        return torch.stack([sequence_gate_kl(before(group)) for group in rows])
    everyone = before(torch.arange(len(scene.outcomes.probs)))
    return (scene.outcomes.probs * sequence_kl(everyone)).sum().expand(rows.shape)


def _check_exclusions(kl: KLConfig, vocab: int) -> None:
    unknown = [name for name in kl.kl_exclude_tokens if not isinstance(name, int) or not 0 <= name < vocab]
    if not unknown:
        return
    got = f"kl_exclude_tokens={unknown}"
    why = f"its tokens are the numbers 0 to {vocab - 1}, without text; ignored, another KL would be examined"
    fix = "use numbers of this world in kl_exclude_tokens, or leave it out"
    raise ConfigError("this world cannot tell which tokens carry no KL", got=got, why=why, fix=fix)


def _kl_mask(kl: KLConfig, y: Outcomes) -> Tensor:
    excluded = torch.tensor([token for token in kl.kl_exclude_tokens if isinstance(token, int)])
    return y.mask & ~torch.isin(y.tokens, excluded)


def _advantages(
    scene: Scene, objective: Objective, loss: LossConfig, kl: KLConfig, gates: Tensor | None
) -> Float[Tensor, "groups size"]:
    rows, _ = scene.groups
    rewards = scene.rewards[rows.flatten()]
    if objective.terms[1:]:
        rewards = less_kl(rewards, _before(scene, objective, kl, rows.flatten()), objective.terms[1:])
    if objective.beta == 0 or objective.terms[0].term.placement != "reward":
        return advantages_in_groups(rewards.view(rows.shape), loss)

    def advantages(rewards: Tensor) -> Tensor:
        return advantages_in_groups(rewards.view(rows.shape), loss).flatten()

    before = _before(scene, objective, kl, rows.flatten(), None if gates is None else gates.flatten())
    beta, term = objective.terms[0]
    return advantages_with_kl(rewards, prepare(before, term), beta=beta, advantages=advantages).view(rows.shape)


def less_kl(rewards: Float[Tensor, " batch"], batch: Batch, terms: Iterable[Weighted]) -> Float[Tensor, " batch"]:
    """The rewards less every KL of these that is taken from them, without a clip. [B]"""
    for coefficient, term in terms:
        if coefficient != 0 and term.placement == "reward":
            rewards = advantages_with_kl(rewards, measure(batch, term), beta=coefficient, advantages=lambda x: x)
    return rewards


def advantages_in_groups(rewards: Float[Tensor, "groups size"], loss: LossConfig) -> Float[Tensor, "groups size"]:
    """The advantages that a policy loss forms of the rewards of each group; alone, a completion's own reward."""
    size = rewards.shape[-1]
    if size == 1:
        return rewards
    advantages = group_advantages(rewards.flatten(), size, scale=loss.scale, baseline=loss.advantage_baseline)
    return advantages.view(rewards.shape)


def quietly(kind: Callable[..., Built], **choices: Any) -> Built:
    """A configuration without the caution that it may deserve: it is here to be shown, or a part of one that was."""
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        return kind(**choices)


@functools.cache
def _list_groups(count: int, size: int) -> tuple[Int[Tensor, "groups size"], Float[Tensor, " groups"]]:
    """Every group of so many out of `count`, in any order, and the number of orders that each can be drawn in."""
    groups = list(itertools.combinations_with_replacement(range(count), size))
    orders = [math.factorial(size) // math.prod(map(math.factorial, Counter(group).values())) for group in groups]
    return torch.tensor(groups), torch.tensor(orders, dtype=torch.float64)
