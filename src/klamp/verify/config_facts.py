"""Measures what the KL of a configuration does: where it pulls, over single tokens and whole completions.

Everything is measured by enumeration through klamp's own loss (`examine_config`), without the clip, so that what is
named is the term itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from klamp.config import KLConfig, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.verify.one_step import Scene, StepReport, examine_config, quietly, scene
from klamp.verify.oracle import Pull, Truths, cosine, gradient_of, local_kl, pull_of, truths
from klamp.verify.worlds import Sampler, Who

SEEDS = range(4)
LENGTH = 3
"""Longest completion of the worlds of whole completions, in tokens."""
JS = "JS(policy, teacher)"
NO_KL = KLConfig(beta=0.0)
TERM = (
    *("kl_estimator", "kl_gradient", "kl_horizon", "kl_placement", "kl_max_log_ratio", "kl_off_policy"),
    *("kl_max_weight", "kl_normalizer"),
)
"""The fields of a KL term, without its coefficient and clip."""


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """Everything that is measured of a KL, for `klamp explain` to put into words; `ref` is whom it holds to."""

    position: Pull
    """The gradient at one position, for tokens of the policy."""
    sequence: Pull
    """The gradient over whole completions of up to three tokens, summed."""
    noise: float
    """Standard deviation of one completion's gradient, in units of the norm of its mean; infinite where that is zero, 0
    where no completion has a gradient."""
    kept: tuple[float, float]
    """Least and largest cosine, by world, of the gradient as the policy loss reduces it with the summed one: 1 where
    the reduction only scales it, 0 where it makes one of nothing."""
    off_policy: Pull
    """The gradient at one position for tokens of an older policy, as in the second update of a rollout."""
    still: bool
    """Of a teacher or the sampler: whether the gradient of every completion is 0 where the policy is that."""
    value_bias: float
    """The KL's part of the loss minus KL(policy||ref), divided by KL(policy||ref); NaN where it is not in the loss."""


def measure_config(kl: KLConfig, loss: LossConfig, *, teacher: TeacherConfig | None = None) -> ConfigFacts:
    """Measures what the KL of a configuration does, by enumeration.

    Args:
        kl: the KL; its beta does not matter.
        loss: the policy loss around it.
        teacher: then it is the KL to that which is measured, without the other.

    Raises:
        ConfigError: a combination that `build_objective` refuses.
    """
    bare, taught = (bare_term(kl), None) if teacher is None else (NO_KL, bare_teacher(teacher))
    term = (teacher or kl).build_term()
    anchor: Who = "ref" if term.anchor == "reference" else term.anchor
    direction = "reverse" if teacher is None else teacher.teacher_direction

    unbounded = {"epsilon": 1.0, "epsilon_high": 1e9, "scale_rewards": "none"}  # no bound of a ratio binds

    def examine(scenes: list[Scene], loss: LossConfig | None = None) -> list[StepReport]:
        return [examine_config(bare, loss, scene=each, teacher=taught) for each in scenes]

    def pull(scenes: list[Scene], reports: list[StepReport]) -> Pull:
        return pull_of([report.kl.gradient for report in reports], [_known(each, anchor) for each in scenes])

    positions = [_world(seed, length=1) for seed in SEEDS]
    chains = [_world(seed, length=LENGTH) for seed in SEEDS]
    older = [_world(seed, length=1, sampler="other") for seed in SEEDS]
    arrived = [replace(each, chain=replace(each.chain, policy_logits=each.chain.logits(anchor))) for each in chains]
    found, reduced = examine(chains), examine(chains, loss)
    whole, averaged = pull(chains, found), pull(chains, reduced)
    in_loss = term.placement == "loss"
    target = sum(local_kl(each.chain.towards(anchor), direction=direction).item() for each in chains)
    value = sum(report.kl.value for report in found)
    return ConfigFacts(
        position=pull(positions, examine(positions)),
        sequence=whole,
        noise=_noise(whole, found),
        kept=_kept(whole, averaged, found, reduced),
        off_policy=pull(older, examine(older, quietly(LossConfig, surrogate=loss.surrogate, **unbounded))),
        still=anchor != "ref"
        and all(r.kl.gradient_variance + r.kl.gradient.norm() < 1e-10 for r in examine(arrived, loss)),
        value_bias=value / target - 1 if in_loss and target else math.nan,
    )


def _known(world: Scene, anchor: Who) -> Truths:
    """The gradients that a KL to an anchor may be meant to follow."""
    if anchor == "ref":
        return world.truths
    chain = world.chain.towards(anchor)
    return truths(chain) | {JS: gradient_of(local_kl(chain, direction="js"), chain)}


def _world(seed: int, *, length: int, sampler: Sampler = "policy") -> Scene:
    return scene(seed, vocab=3, length=length, sampler=sampler, group_size=1)


def bare_term(kl: KLConfig) -> KLConfig:
    """The KL term alone: beta 1, no clip, no controller, no excluded tokens."""
    reference = "sampler" if kl.reference == "sampler" else "auto"
    return quietly(KLConfig, beta=1.0, reference=reference, **{name: getattr(kl, name) for name in TERM})


def bare_teacher(teacher: TeacherConfig, coef: float = 1.0) -> TeacherConfig:
    """A KL to a teacher with this coefficient, and of a head, which covers a world of three words, no more than one."""
    return quietly(partial(replace, teacher), teacher_coef=coef, teacher_top_k=min(teacher.teacher_top_k, 1))


def _noise(pull: Pull, reports: list[StepReport]) -> float:
    spread = math.sqrt(sum(report.kl.gradient_variance for report in reports))
    if pull.follows.name == "zero":
        return math.inf if spread > 1e-9 else 0.0
    return spread / math.hypot(*(float(report.kl.gradient.norm()) for report in reports))


def _kept(whole: Pull, averaged: Pull, found: list[StepReport], reduced: list[StepReport]) -> tuple[float, float]:
    """How well the reduced gradient points where the summed one does."""
    if "zero" in (whole.follows.name, averaged.follows.name):
        same = float(whole.follows.name == averaged.follows.name)
        return same, same
    cosines = [cosine(a.kl.gradient, b.kl.gradient) for a, b in zip(reduced, found, strict=True)]
    return min(cosines), max(cosines)
