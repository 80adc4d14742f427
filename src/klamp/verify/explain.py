"""What a KL term does in plain words: facts that are measured by enumeration, as sentences.

>>> from klamp.config import KLConfig, LossConfig
>>> explain_config(KLConfig(kl_gradient="forward"), LossConfig(), name="mine").verdict
'Pulls the policy along the gradient of KL(ref||policy), token by token.'
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import cast, get_args

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.beyond import NO_PRICE, beyond_cautions, check_beyond
from klamp.config.describe import (
    describe_average,
    describe_clip,
    describe_controller,
    describe_movement,
    describe_price,
    describe_teacher,
)
from klamp.config.kl import wide_clip
from klamp.config.loss import Price, configured_price, kl_reduction
from klamp.config.teacher import TeacherConfig
from klamp.core.clipping import clip_gate, kl_budget
from klamp.core.estimators import ESTIMATORS, exact_kl
from klamp.core.gradients import kl_penalty
from klamp.core.objective import Objective, grpo_loss
from klamp.core.surrogates import trm_bound
from klamp.core.term import KLTerm
from klamp.core.types import Direction
from klamp.verify.convergence import BETA, COEF, follow, teacher_price, worlds
from klamp.verify.judge import Explanation, Line, far_faults
from klamp.verify.one_step import NO_KL, Scene, StepReport, batch_of, examine_config, quietly, scene
from klamp.verify.oracle import IN_WORDS, Pull, cosine, gradient_of, local_kl, pull_of, say_of, truths
from klamp.verify.worlds import Chain, Who, enumerate_outcomes, random_chain

SEEDS = range(4)
LENGTH = 3
"""Longest completion of the worlds of whole completions, in tokens."""
TERM = ["estimator", "gradient", "baseline", "horizon", "placement", "max_log_ratio", "off_policy", "max_weight"]
TERM += ["normalizer"]
"""The fields `kl_...` of a KL term, without its coefficient and clip."""
DIVERGENCES: Mapping[Direction, str] = {direction: IN_WORDS[direction] for direction in get_args(Direction)}
STRAIGHT = 0.9999
"""Cosine from which a reduction is said to scale a gradient, and not to turn it."""
MOVING = ("ema", "periodic", "live")
"""Anchors that are made of the policy again and again."""


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """Everything that is measured of the KL to an anchor, which is called ref here."""

    position: Pull
    """The gradient at one position, for tokens of the policy."""
    sequence: Pull
    """The gradient over whole completions of up to three tokens, summed."""
    noise: float
    """Standard deviation of one completion's gradient, in units of the norm of its mean; infinite where that is zero, 0
    where no completion has a gradient."""
    reduced: tuple[float, float]
    """Least and largest cosine, by world, of the gradient as the policy loss reduces it with the summed one: 1 where
    the reduction only scales it, 0 where it makes one of nothing."""
    off_policy: Pull
    """The gradient at one position for tokens of an older policy, as in the second update of a rollout."""
    still: bool
    """Of a teacher or the sampler: whether the gradient of every completion is 0 where the policy is that."""
    value_bias: float
    """The KL's part of the loss minus KL(policy||ref), divided by KL(policy||ref); NaN where it is not in the loss."""


def measure_config(anchor: KLConfig | TeacherConfig, loss: LossConfig) -> ConfigFacts:
    """Measures what a KL does, by enumeration through klamp's own loss, without its coefficient and clip.

    Args:
        anchor: the KL to the reference or the sampler, or that to a teacher.
        loss: the policy loss around it.

    Raises:
        ConfigError: a combination that `build_objective` refuses.
    """
    kl, teacher = (bare_term(anchor), None) if isinstance(anchor, KLConfig) else (NO_KL, bare_teacher(anchor))
    term, direction = anchor.build_term(), "reverse" if teacher is None else teacher.teacher_direction
    who = cast(Who, "ref" if term.anchor == "reference" else term.anchor)

    def examine(scenes: list[Scene], loss: LossConfig | None = None) -> list[StepReport]:
        return [examine_config(kl, loss, scene=world, teacher=teacher) for world in scenes]

    def pull(scenes: list[Scene], steps: list[StepReport]) -> Pull:
        return pull_of([step.kl.gradient for step in steps], [truths(world.chain.towards(who)) for world in scenes])

    world_of = partial(scene, vocab=3, group_size=1)
    positions, chains = ([world_of(seed, length=length) for seed in SEEDS] for length in (1, LENGTH))
    older = [world_of(seed, length=1, sampler="other") for seed in SEEDS]
    arrived = [replace(world, chain=replace(world.chain, policy_logits=world.chain.logits(who))) for world in chains]
    unbounded = {"epsilon": 1.0, "epsilon_high": 1e9, "scale_rewards": "none"}  # no bound of a ratio binds
    steps, reduced = examine(chains), examine(chains, loss)
    whole = pull(chains, steps)
    target = sum(local_kl(world.chain.towards(who), direction=direction).item() for world in chains)
    value = sum(step.kl.value for step in steps)
    at_anchor = (step.kl for step in (examine(arrived, loss) if who != "ref" else ()))
    return ConfigFacts(
        position=pull(positions, examine(positions)),
        sequence=whole,
        noise=_noise(whole, steps),
        reduced=_compare(whole, pull(chains, reduced), steps, reduced),
        off_policy=pull(older, examine(older, quietly(LossConfig, surrogate=loss.surrogate, **unbounded))),
        still=who != "ref" and all(kl.gradient_variance + kl.gradient.norm() < 1e-10 for kl in at_anchor),
        value_bias=value / target - 1 if term.placement == "loss" and target else math.nan,
    )


def bare_term(kl: KLConfig) -> KLConfig:
    """The KL term alone: beta 1, no clip, no controller, no excluded tokens."""
    reference = "sampler" if kl.reference == "sampler" else "auto"
    return quietly(
        KLConfig, beta=1.0, reference=reference, **{name: getattr(kl, name) for name in map("kl_{}".format, TERM)}
    )


def bare_teacher(teacher: TeacherConfig, coef: float = 1.0) -> TeacherConfig:
    """A KL to a teacher with this coefficient, and of a head, which covers a world of three words, no more than one."""
    return quietly(partial(replace, teacher), teacher_coef=coef, teacher_top_k=min(teacher.teacher_top_k, 1))


def _noise(pull: Pull, steps: list[StepReport]) -> float:
    spread = math.sqrt(sum(step.kl.gradient_variance for step in steps))
    if pull.follows.name == "zero":
        return math.inf if spread > 1e-9 else 0.0
    return spread / math.hypot(*(float(step.kl.gradient.norm()) for step in steps))


def _compare(whole: Pull, averaged: Pull, steps: list[StepReport], reduced: list[StepReport]) -> tuple[float, float]:
    """How well the reduced gradient points where the summed one does."""
    if "zero" in (whole.follows.name, averaged.follows.name):
        same = float(whole.follows.name == averaged.follows.name)
        return same, same
    cosines = [cosine(a.kl.gradient, b.kl.gradient) for a, b in zip(reduced, steps, strict=True)]
    return min(cosines), max(cosines)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The lengths, group and paper that the numbers of an explanation depend on."""

    length: int = 1000
    """Expected completion length in tokens."""
    max_length: int | None = None
    """Longest completion in tokens; None: the expected one."""
    group_size: int = 8
    paper: str = ""
    rewarded: bool = True
    updates: int | None = None
    """Updates on each batch of completions; None: unknown."""

    def price(self, kl: KLConfig, loss: LossConfig) -> Price:
        """The price of a nat away from the reference."""
        longest = self.max_length or self.length
        return configured_price(kl, loss, group_size=self.group_size, mean_length=self.length, max_length=longest)


def explain_config(
    kl: KLConfig, loss: LossConfig, *, name: str, setting: Setting | None = None, teacher: TeacherConfig | None = None
) -> Explanation:
    """Explains what the KL of a configuration does; every statement about a gradient is measured by enumeration.

    Args:
        kl: the KL.
        loss: the policy loss around it.
        name: what to call it.
        setting: expected length, group, paper, updates, and whether there is a reward.
        teacher: the second anchor.

    Raises:
        ConfigError: a combination that `build_objective` refuses.
    """
    setting, teacher = setting or Setting(), teacher if teacher is not None and teacher.there else None
    check_beyond(kl, teacher)
    around = [("paper", setting.paper)] if setting.paper else []
    around += [("trust region", text) for text in _explain_trust(loss, setting.length)] if loss.trust.is_set else []
    loss = replace(loss, rollout_rs=None, rollout_rs_threshold=None)  # the KL stays outside of masks
    if not kl.needs_reference and teacher is None:
        text = "No KL: beta is 0, no reference is loaded, and it costs nothing."
        lines = [("monitor", "kl_monitor=True loads a reference and measures the KL"), *around]
        return Explanation(name=name, verdict=text, lines=tuple(lines), cautions=())
    parts = [_explain_kl(kl, loss, setting)] if kl.needs_reference else []
    parts += [] if teacher is None else [_explain_teacher(loss, setting, teacher)]
    lines = [line for _, lines in parts for line in lines]
    if kl.needs_reference:
        around.insert(0, ("control", f"beta {describe_controller(kl)}"))
    if moving := describe_movement(kl):
        around.append(("reference", f"{moving}; a KL to it does not bound the distance from the start"))
    wide = [] if kl.kl_reference_length else [wide_clip(kl, setting.length)]  # the length is the explanation's
    cautions = (*kl.cautions(), *beyond_cautions(kl, teacher), *wide, *(() if teacher is None else teacher.cautions()))
    return Explanation(
        name=name,
        verdict=" ".join(verdict for verdict, _ in parts),
        lines=(*lines, *_explain_end(kl, loss, setting, teacher), *around),
        cautions=tuple(dict.fromkeys(filter(None, cautions))),
    )


def _explain_kl(kl: KLConfig, loss: LossConfig, setting: Setting) -> tuple[str, list[Line]]:
    """Verdict and lines of the KL to the reference or the sampler."""
    facts, proximal = measure_config(kl, loss), kl.reference == "sampler"
    measured, who = _measured(kl, facts), "sampler" if proximal else "ref"
    if kl.beta == 0:
        return "No pull: beta is 0; the KL is only measured and logged.", [x for x in measured if x[0] == "value"]
    lines = [("" if i else "equation", say_of(who, text)) for i, text in enumerate(equations(kl, loss))]
    lines += [*measured, ("limits", _limits(kl, setting))]
    if kl.kl_placement == "loss" and kl.kl_estimator != "exact":
        choices = {"value": kl.kl_estimator, "gradient": kl.kl_gradient, "max_log_ratio": kl.kl_max_log_ratio}
        penalty = partial(kl_penalty, mask=torch.ones(1, 1, dtype=torch.bool), horizon=kl.kl_horizon, **choices)
        faults = far_faults(penalty, moves=facts.position.follows.name != "zero")
        lines.append(("at 30 nats", faults or "finite in float32, bfloat16 and float16"))
    clipped = kl.kl_clip_method != "none"
    if kl.beta < 0:
        lines.append(("price", NO_PRICE))
        return "Goes beyond the teacher: a negative beta rewards KL(policy||ref), and the teacher bounds it.", lines
    if setting.rewarded and facts.position.follows.factor > 0 and not proximal:
        price = describe_price(setting.price(kl, loss), group_size=setting.group_size) + ", above the budget" * clipped
        moves = "" if kl.controller_name == "fixed" else "moves with beta; at its start "
        lines.append(("price", moves + price))
    verdict = verdict_of(facts, kl_reduction(kl, loss), proximal=proximal, updates=setting.updates)
    return verdict + " Clipped: see limits." * clipped, lines


def _explain_teacher(loss: LossConfig, setting: Setting, teacher: TeacherConfig) -> tuple[str, list[Line]]:
    """Verdict and lines of the KL to a teacher, with or without a KL to the reference."""
    facts = measure_config(teacher, loss)
    head = " (a head of 1 in these worlds)" * (teacher.teacher_estimator == "topk" and teacher.teacher_top_k > 0)
    lines = [("teacher", f"{describe_teacher(teacher)}{head}"), *_measured(teacher, facts)]
    if facts.position.follows.factor > 0 and setting.rewarded:
        price = teacher_price(teacher, loss, group_size=setting.group_size)
        words = describe_price(price, group_size=setting.group_size, name="teacher_coef")
        lines.append(("price", f"to the teacher: {words}"))
    elif facts.position.follows.factor > 0:
        lines.append(("price", "none: without a reward a coefficient is only a share of the steps"))
    return say_of("teacher", verdict_of(facts, kl_reduction(NO_KL, loss))), lines


def _explain_end(kl: KLConfig, loss: LossConfig, setting: Setting, teacher: TeacherConfig | None) -> list[Line]:
    """The mix of a reference and a teacher, with its price, and where the run ends; nothing under a clip."""
    held, lines = kl.beta != 0 and kl.reference != "sampler", list[Line]()
    if (held and (kl.kl_clip_method != "none" or kl.excludes)) or not (held or teacher):
        return []
    if teacher is not None and not setting.rewarded:  # nothing is compared
        loss, setting = replace(loss, advantage_baseline="leave_one_out"), replace(setting, group_size=2)
    if held and teacher is not None and teacher.teacher_direction == "reverse" and kl.kl_gradient == "reverse":
        to_teacher = teacher_price(teacher, loss, group_size=setting.group_size)
        beta, coef = setting.price(kl, loss).per_completion, to_teacher.per_completion
        mix = f"ref^{beta / (beta + coef):.3g} teacher^{coef / (beta + coef):.3g}"
        scaled = " x the standard deviation of a group's rewards" if setting.rewarded and to_teacher.scaled else ""
        costs = f"over whole completions a nat away from it costs {beta + coef:.3g}{scaled}"
        lines.append(("mix", f"{mix}, normalised: {costs}"))
    who = "ref" if teacher is None else "mix" if held else "teacher"
    return [*lines, ("ends", where_it_ends(kl, loss, teacher, who, rewarded=setting.rewarded))]


@cache
def measure_trust(loss: LossConfig, lag: float) -> list[float]:
    """What a policy loss follows on the tokens of a sampler that the policy left by a lag, by enumeration.

    KL(sampler||policy) per token; relative to the gradient of the expected reward the error against it, the error
    against it at the sampler's prefixes, and what a constant advantage leaves; the share of the advantages that is cut.
    """
    objective = replace(build_objective(NO_KL, loss, max_length=LENGTH), reduction="sequence_sum")
    return torch.stack([_followed(objective, lag, seed) for seed in SEEDS]).mean(0).tolist()


def _followed(objective: Objective, lag: float, seed: int) -> Tensor:
    drawn = random_chain(seed, vocab=4, length=LENGTH, eos=None)
    sampler, generator = drawn.policy_logits.detach(), torch.Generator().manual_seed(seed)
    chain = Chain(sampler + lag * drawn.ref_logits, sampler, sampler, length=LENGTH)
    y = enumerate_outcomes(chain)
    reward, one = torch.randn(y.probs.shape, generator=generator, dtype=torch.float64), torch.ones_like(y.probs)
    reward, kl = reward - y.probs @ reward, exact_kl(y.policy_logits, y.ref_logits, direction="forward").detach()
    scores = {"policy_logprobs": y.policy_logprobs, "mask": y.mask, "sampler.logprobs": y.sampler_logprobs}
    scores |= {"sampler.forward_kl": kl} | ({} if objective.trust.mode else {"old_logprobs": y.sampler_logprobs})
    batches = (batch_of(scores, advantages=len(one) * y.probs * x) for x in (reward, one, -one))
    outputs = [grpo_loss(batch, objective) for batch in batches]
    pull, *constant = (-gradient_of(output.loss, chain) for output in outputs)
    whole = gradient_of(y.policy_logprobs.sum(-1).exp() @ reward, chain)
    errors = pull - whole, pull - gradient_of(y.probs @ (y.weight * reward[:, None]).sum(-1), chain)
    sizes = [x.norm() / whole.norm() for x in (*errors, max(constant, key=torch.norm))]
    return torch.stack([(y.probs @ kl).mean(), *sizes, outputs[0].metrics["sampler/advantage_cut"]])


def _explain_trust(loss: LossConfig, length: int) -> Iterator[str]:
    """The trust region to the sampler, what the policy loss follows under it, and TRM's bound."""
    yield str(loss.trust)
    for lag in (0.1, 0.5):
        distance, *shares = measure_trust(loss, lag)
        policy, prefixes, residue, cut = (f"{100 * x:.0f} %" for x in shares)
        text = f"{distance:.1g} nats per token from the sampler: {policy} off the policy's gradient, {prefixes} off it "
        yield f"{text}at the sampler's prefixes; a constant advantage leaves {residue}; {cut} of the advantages cut"
    if loss.rollout_rs == "seq_max_exact":
        bound = float(trm_bound(torch.full((1, length), loss.rollout_rs_threshold or 0.0), torch.ones(1, length) > 0))
        empty = "; empty: rewards between 0 and 1 differ by no more than 1" * (bound >= 1)
        yield f"TRM's bound at {length} tokens: {bound:.3g}, an estimate from the prefixes drawn, no guarantee{empty}"


def _measured(anchor: KLConfig | TeacherConfig, facts: ConfigFacts) -> list[Line]:
    """What the KL to an anchor does alone; the policy's own tokens cannot show the sampler."""
    term, direction = anchor.build_term(), "reverse" if isinstance(anchor, KLConfig) else anchor.teacher_direction
    older = facts.off_policy.in_words(_bounds(term, weighed=True)) + _advice(term, facts)
    lines = {
        "value": _value(term, facts, direction),
        "pull": f"at one position {facts.position.in_words(_bounds(term))}",
        "sequence": f"over whole completions, of up to {LENGTH} tokens: {facts.sequence.in_words(_bounds(term))}",
        "off-policy": f"tokens of an older policy (second update of a rollout): {older}",
        "noise": f"the gradient of one completion scatters by {facts.noise:.2g} times its mean, in the worlds measured",
    }
    still = "exactly 0 in every sample" if facts.still else "not 0 in every sample"
    if term.anchor == "sampler":
        lines = {"pull": f"first update of a batch: {still}, at any beta", "off-policy": lines["off-policy"]}
    if term.anchor == "teacher":
        del lines["sequence"]
        lines["at teacher"] = f"the gradient is {still} where the policy is the teacher"
    who = "ref" if term.anchor == "reference" else term.anchor
    return [(label, say_of(who, text)) for label, text in lines.items()]


def verdict_of(facts: ConfigFacts, reduction: str, *, proximal: bool = False, updates: int | None = None) -> str:
    """What it does, with the reduction in force: a mean over each completion's own length bends most gradients."""
    if proximal and facts.still and updates == 1:
        return "Does nothing: with one update per batch (num_iterations 1) its gradient is exactly 0 at any beta."
    if proximal and facts.off_policy.follows.factor <= 0:
        return "A proximal term that follows neither KL to the sampler."
    if proximal:
        return "A proximal term: holds the later updates of a batch near who drew it, and the run to nothing."
    one, whole, (least, most) = facts.position.follows, facts.sequence.follows, facts.reduced
    if one.name == "zero":
        rest = f"; under {reduction} what is left pulls on the length of completions alone" if least < 1 else ""
        return f"Regularises nothing: its expected gradient, summed over tokens, is zero{rest}."
    if one.name not in DIVERGENCES or one.factor < 0:
        return f"Follows neither KL: {facts.position.direction}."
    reach = "over whole completions" if whole.name == one.name != "js" else "token by token"
    under = f", bent by {reduction} (cosine {least:.3f} to {most:.3f} with the sum over tokens, by world)"
    return f"Pulls the policy along the gradient of {one.in_words}, {reach}{under if least < STRAIGHT else ''}."


def _value(term: KLTerm, facts: ConfigFacts, direction: Direction) -> str:
    if math.isnan(facts.value_bias):
        where = f"it is in the {term.placement}, not in the loss"
        return f"{term.value}, an unbiased sample of KL(policy||ref){_bounds(term)}; {where}"
    right = abs(facts.value_bias) < 1e-9
    off = "unbiased for" if right else f"{100 * facts.value_bias:+.1f} % off, in the worlds measured,"
    bounds = _bounds(term) if right else ""
    return f"{term.value}, in nats: {off} {DIVERGENCES[direction]}, tokens of the policy{bounds}"


def _bounds(term: KLTerm, *, weighed: bool = False) -> str:
    """Up to where a sentence holds that names a value or a gradient exactly: the worlds measured pass no far bound."""
    bounds = list[str]()
    if term.max_log_ratio is not None and not term.of_prefixes:
        bounds.append(f"no log-ratio passes {term.max_log_ratio:g} nats")
    if weighed and term.max_weight is not None and term.off_policy != "none":
        bounds.append(f"no weight passes {term.max_weight:g}")
    return f", while {' and '.join(bounds)}" if bounds else ""


def _advice(term: KLTerm, facts: ConfigFacts) -> str:
    """What corrects a gradient that is neither KL's for tokens of an older policy."""
    if facts.off_policy.follows.factor or facts.off_policy.follows.name == "zero":
        return ""
    if term.placement == "reward":
        return "; its KL belongs to the policy that sampled, and goes stale with every further update"
    if term.placement == "advantage":
        return ""
    proximal = term.anchor == "sampler" and term.gradient in ("reverse", "forward")
    if term.off_policy != "none" or not (facts.position.follows.factor or proximal):
        return ""
    cut = "" if term.max_weight is None else f", while no weight passes {term.max_weight:g}"
    return f"; {'teacher' if term.anchor == 'teacher' else 'kl'}_off_policy='{term.horizon}' corrects that{cut}"


def _limits(kl: KLConfig, setting: Setting) -> str:
    parts: list[str] = []
    if kl.kl_clip_method != "none":
        length, per_token = kl.kl_reference_length or setting.length, kl.use_per_token_kl_threshold
        budget = float(kl_budget(kl.kl_clip_threshold, per_token=per_token, reference_length=length))
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
        factors = clip_gate(sizes * budget, budget, method=kl.kl_clip_method, temperature=kl.kl_clip_temperature)
        at = ", ".join(f"{100 * factor:.3g} % at {size:g}" for size, factor in zip(sizes, factors, strict=True))
        none = "always open" if kl.kl_clip_method == "hard" else "half open at a KL of 0, further above"
        nats = f" = {budget:g} nats per completion" if per_token else ""
        gate = f"open by KL in budgets: {at}" if budget else none
        parts.append(f"{describe_clip(kl, length=length)}{nats}; gate {gate}")
    if kl.kl_max_log_ratio is not None and kl.kl_estimator != "exact":
        bound = kl.kl_max_log_ratio
        parts.append(f"log-ratio bounded at +-{bound:g} nats, straight-through: the gradient stays, at that size")
    summed = kl.kl_estimator == "exact" and kl.kl_off_policy == "token"
    if kl.kl_max_weight is not None and kl.kl_off_policy != "none" and not summed:
        parts.append(f"off-policy weight cut at {kl.kl_max_weight:g}: bounded noise, biased where it is cut")
    if kl.excludes:
        parts.append("kl_exclude_tokens: nothing holds these tokens in a run; all tokens are in the KL measured here")
    return "; ".join(parts) or "none: no clip, and nothing is cut off"


EXACT = "sum_v policy_v (log policy_v - log ref_v)"
SLOPES: Mapping[tuple[str, str], str] = {
    ("token", "reverse"): "{w}delta_t",
    ("token", "forward"): "{w}(1 - exp(-delta_t))",
    ("token", "own"): "{w}{own}",
    ("sequence", "reverse"): "({w}delta_t + sum over later j of {later}_j)",
    ("sequence", "forward"): "({w}1 - product over j <= t of ref_j/{by}_j)",
}
"""(horizon, gradient) -> the coefficient of grad log policy_t."""
WEIGHTS = {
    "none": ("", ""),
    "token": ("w_t ", ", w_t = policy_t/sampler_t"),
    "sequence": ("rho_t ", ", rho_t = product of policy/sampler up to t"),
}
"""Off-policy weight -> what it is called, and what it is."""


def equations(kl: KLConfig, loss: LossConfig) -> list[str]:
    """What the KL of a configuration adds, and where, and its gradient; delta = log policy - log ref."""
    gate = "" if kl.kl_clip_method == "none" else ", times the gate"
    if kl.kl_placement == "reward" and gate:
        return [f"advantage = A[reward] - beta * A[sum_t delta_t]{gate}; A: how advantages are formed of rewards"]
    if kl.kl_placement == "reward":
        return ["reward = reward - beta * sum_t delta_t, before the advantages are formed"]
    if kl.kl_placement == "advantage":
        shift = "sum over j >= t of delta_j" if kl.kl_horizon == "sequence" else "delta_t"
        return [f"advantage_t = advantage_t - beta * {shift}{gate}, after the advantages are formed"]
    added = f"loss = policy loss + beta * R[penalty], R: {describe_average(kl_reduction(kl, loss))}"
    value, slope = _exact_equation(kl) if kl.kl_estimator == "exact" else _sampled_equation(kl)
    slope = "0" if kl.kl_gradient == "none" else slope
    return [added, f"penalty_t = {value}", f"gradient of penalty_t = {slope}{gate}"]


def _exact_equation(kl: KLConfig) -> tuple[str, str]:
    slope = "grad " + ("sum_v ref_v (log ref_v - log policy_v)" if kl.kl_gradient == "forward" else EXACT)
    return EXACT, slope + ", and sum over later j of exact_j times grad log policy_t" * (kl.kl_horizon == "sequence")


def _sampled_equation(kl: KLConfig) -> tuple[str, str]:
    """Value and gradient of the penalty of an estimator, as its row of the table of estimators gives them."""
    row, (weight, where) = ESTIMATORS[kl.kl_estimator], WEIGHTS[kl.kl_off_policy]
    value, own = (text.replace("delta", "delta_t") for text in (row.formula, row.slope))
    own = f"({own})" if " " in own else own
    later, by = "k3" if row.name == "k3" else "delta", "policy"
    if weight:
        value, later, by = f"{weight}({value}){where}", f"rho_j {later}", "sampler"
    slope = SLOPES.get((kl.kl_horizon, kl.kl_gradient), "")
    return value, slope.format(w=weight, later=later, by=by, own=own) + " grad log policy_t"


def where_it_ends(kl: KLConfig, loss: LossConfig, teacher: TeacherConfig | None, who: str, *, rewarded: bool) -> str:
    """The fixed point of the expected update in the largest world of `klamp verify convergence`, held to `who`."""
    held, moved = who != "teacher", teacher is not None and teacher.teacher_schedule != "constant"
    moved |= held and (kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.reference in MOVING)
    if moved or (teacher is not None and teacher.kind in MOVING):
        return "not known: a coefficient moves, or an anchor with the policy"
    world = worlds()[-1] if rewarded else Scene(chain=worlds()[-1].chain)
    bare = None if teacher is None else bare_teacher(teacher, COEF)
    beta = COEF * kl.beta / teacher.teacher_coef if teacher is not None and kl.beta < 0 else BETA
    end = follow(replace(bare_term(kl), beta=beta) if held else NO_KL, loss, world, bare)
    coefficients = [f"beta {beta:.3g}"] * held + [f"teacher_coef {COEF:g}"] * (teacher is not None)
    at = f"completions of up to {world.chain.length} tokens, all counted, {', '.join(coefficients)}"
    if not end.stands:
        return f"nowhere: {end.kl:.2g} nats from the {who.replace('ref', 'reference')} it is still moving ({at})"
    if not rewarded:
        return f"{'at' if end.exact else f'{end.distance:.2g} nats from'} the {who} ({at})"
    target = f"{who} exp(reward / price)"
    if end.exact:
        return f"at the optimum of E[reward] - price KL(policy||{who}): {target} ({at})"
    name, distance, best_kl, best_length = "optimum", end.distance, end.optimal_kl, end.optimal_length
    if loss.scale == "std":
        target += f", price {end.price:.2g}"
        name, distance, best_kl, best_length = "nearest optimum", end.nearest, end.nearest_kl, end.nearest_length
    against = f"KL {end.kl:.2f} against {best_kl:.2f}, length {end.length:.2f} against {best_length:.2f}"
    return f"{distance:.2g} nats from the {name} {target}: {against} ({at})"
