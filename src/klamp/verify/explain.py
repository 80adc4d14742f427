"""What a KL term, or a formula that is printed somewhere as a KL, does in plain words: measured facts as sentences.

>>> from klamp.config import KLConfig, LossConfig
>>> explain_config(KLConfig(kl_gradient="forward"), LossConfig(), name="mine").verdict
'Pulls the policy along the gradient of KL(ref||policy), token by token.'
>>> explain_form("k1-as-loss").verdict
'the value is right; the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from klamp.config import KLConfig, LossConfig
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
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import kl_penalty
from klamp.core.term import KLTerm
from klamp.core.types import Direction
from klamp.errors import check_name
from klamp.verify.config_facts import JS, LENGTH, NO_KL, ConfigFacts, bare_teacher, bare_term, measure_config
from klamp.verify.convergence import BETA, COEF, follow, teacher_price, worlds
from klamp.verify.judge import DTYPES, FAR, KLFunction, Use, ValueFinding, as_loss, judge_value, one_token
from klamp.verify.one_step import Scene
from klamp.verify.oracle import TOLERANCE, Loss, Pull, expected, expected_pull, in_reward
from klamp.verify.proofs.values import exact
from klamp.verify.worlds import random_chain, random_positions

Line = tuple[str, str]

MEASURED: Mapping[Direction, str] = {"reverse": "KL(policy||ref)", "forward": "KL(ref||policy)", "js": JS}
STRAIGHT = 0.9999
"""Cosine from which a reduction is said to scale a gradient, and not to turn it."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a KL term does, ready to be printed."""

    name: str
    verdict: str
    """What it does, in a sentence."""
    lines: tuple[Line, ...]
    """The facts behind the verdict, as pairs of label and text."""
    cautions: tuple[str, ...]
    """What it may not do although its name suggests it; each with the way out."""


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
    setting, taught = setting or Setting(), teacher if teacher is not None and teacher.there else None
    around = [("paper", setting.paper)] if setting.paper else []
    if not kl.needs_reference and taught is None:
        text = "No KL: beta is 0, no reference is loaded, and it costs nothing."
        lines = [("monitor", "kl_monitor=True loads a reference and measures the KL"), *around]
        return Explanation(name=name, verdict=text, lines=tuple(lines), cautions=())
    parts = [_of_kl(kl, loss, setting, alone=taught is None)] if kl.needs_reference else []
    parts += [] if taught is None else [_of_teacher(kl, loss, setting, taught)]
    lines = [line for _, lines in parts for line in lines]
    if kl.needs_reference:
        around.insert(0, ("control", f"beta {describe_controller(kl)}"))
    if moving := describe_movement(kl):
        around.append(("reference", f"{moving}; a KL to it does not bound the distance from the start"))
    wide = [] if kl.kl_reference_length else [wide_clip(kl, setting.length)]  # the length is the explanation's
    cautions = (*kl.cautions(), *wide, *(() if taught is None else taught.cautions()))
    return Explanation(
        name=name,
        verdict=" ".join(verdict for verdict, _ in parts),
        lines=(*lines, *around),
        cautions=tuple(dict.fromkeys(filter(None, cautions))),
    )


def _of_kl(kl: KLConfig, loss: LossConfig, setting: Setting, *, alone: bool) -> tuple[str, list[Line]]:
    facts, reduction = measure_config(kl, loss), kl_reduction(kl, loss)
    measured, proximal = _measured(kl, facts), kl.reference == "sampler"
    if kl.beta == 0:
        return "No pull: beta is 0; the KL is only measured and logged.", [x for x in measured if x[0] == "value"]
    lines = [("" if i else "equation", _towards(text, kl)) for i, text in enumerate(equations(kl, loss))]
    lines += [*measured, ("limits", _limits(kl, setting))]
    if kl.kl_placement == "loss" and kl.kl_estimator != "exact":
        choices = {"value": kl.kl_estimator, "gradient": kl.kl_gradient, "max_log_ratio": kl.kl_max_log_ratio}
        penalty = partial(kl_penalty, mask=torch.ones(1, 1, dtype=torch.bool), horizon=kl.kl_horizon, **choices)
        faults = far_faults(penalty, moves=facts.position.follows.name != "zero")
        lines.append(("at 30 nats", faults or "finite in float32, bfloat16 and float16"))
    clipped = kl.kl_clip_method != "none"
    if setting.rewarded and facts.position.follows.factor > 0 and not proximal:
        price = describe_price(setting.price(kl, loss), group_size=setting.group_size)
        lines.append(("price", price + ", above the budget" * clipped))
    if alone and not proximal and not clipped and not kl.excludes:
        lines.append(("ends", where_it_ends(kl, loss, None, "ref", rewarded=setting.rewarded)))
    verdict = verdict_of(facts, reduction, proximal=proximal, updates=setting.updates)
    return verdict + " Clipped: see limits." * clipped, lines


def _of_teacher(kl: KLConfig, loss: LossConfig, setting: Setting, teacher: TeacherConfig) -> tuple[str, list[Line]]:
    """Verdict and lines of the KL to a teacher, which a KL to the reference may stand beside."""
    facts, reduction = measure_config(NO_KL, loss, teacher=teacher), kl_reduction(NO_KL, loss)
    head = " (a head of 1 in these worlds)" * (teacher.teacher_estimator == "topk" and teacher.teacher_top_k > 0)
    lines = [("teacher", f"{describe_teacher(teacher)}{head}"), *_measured(teacher, facts)]
    if not setting.rewarded:  # nothing is compared
        loss, setting = replace(loss, advantage_baseline="leave_one_out"), replace(setting, group_size=2)
    held = kl.beta > 0 and kl.reference != "sampler"
    to_ref = setting.price(kl, loss) if held else None
    lines += _shared(kl, loss, setting, teacher, to_ref, pays=facts.position.follows.factor > 0)
    return _towards(verdict_of(facts, reduction), teacher), lines


def _shared(
    kl: KLConfig, loss: LossConfig, setting: Setting, teacher: TeacherConfig, to_ref: Price | None, *, pays: bool
) -> list[Line]:
    """The price of a teacher, its mix with a reference that costs `to_ref`, and where the run ends."""
    price, lines = teacher_price(teacher, loss, group_size=setting.group_size), list[Line]()
    if pays:
        words = describe_price(price, group_size=setting.group_size, name="teacher_coef")
        silent = "none: without a reward a coefficient is only a share of the steps"
        lines.append(("price", f"to the teacher: {words}" if setting.rewarded else silent))
    if to_ref is not None and (kl.kl_clip_method != "none" or kl.excludes):
        return lines
    if to_ref is not None and teacher.teacher_direction == "reverse" and kl.kl_gradient == "reverse":
        beta, coef = to_ref.per_completion, price.per_completion
        mix = f"ref^{beta / (beta + coef):.3g} teacher^{coef / (beta + coef):.3g}"
        scaled = " x the standard deviation of a group's rewards" if setting.rewarded and price.scaled else ""
        costs = f"over whole completions a nat away from it costs {beta + coef:.3g}{scaled}"
        lines.append(("mix", f"{mix}, normalised: {costs}"))
    who = "teacher" if to_ref is None else "mix"
    return [*lines, ("ends", where_it_ends(kl, loss, teacher, who, rewarded=setting.rewarded))]


def _measured(anchor: KLConfig | TeacherConfig, facts: ConfigFacts) -> list[Line]:
    """What the KL to an anchor does by itself; the policy's own tokens say nothing of the sampler."""
    term, reach = anchor.build_term(), f"over whole completions, of up to {LENGTH} tokens"
    older = "tokens of an older policy (second update of a rollout)"
    lines = {
        "value": _value(term, facts, "reverse" if isinstance(anchor, KLConfig) else anchor.teacher_direction),
        "pull": f"at one position {describe_pull(facts.position, _bounds(term))}",
        "sequence": f"{reach}: {describe_pull(facts.sequence, _bounds(term))}",
        "off-policy": f"{older}: {describe_pull(facts.off_policy, _bounds(term, weighed=True))}{_advice(term, facts)}",
        "noise": f"the gradient of one completion scatters by {facts.noise:.2g} times its mean, in the worlds measured",
    }
    still = "exactly 0 in every sample" if facts.still else "not 0 in every sample"
    if term.anchor == "sampler":
        lines = {"pull": f"first update of a batch: {still}, at any beta", "off-policy": lines["off-policy"]}
    if term.anchor == "teacher":
        del lines["sequence"]
        lines["at teacher"] = f"the gradient is {still} where the policy is the teacher"
    return [(label, _towards(text, anchor)) for label, text in lines.items()]


def _towards(text: str, anchor: KLConfig | TeacherConfig) -> str:
    """A sentence about the reference, said of another anchor."""
    who = "teacher" if isinstance(anchor, TeacherConfig) else "sampler" if anchor.reference == "sampler" else "ref"
    return re.sub(r"\bref(?=\b|_)", who, text)


def verdict_of(facts: ConfigFacts, reduction: str, *, proximal: bool = False, updates: int | None = None) -> str:
    """What it does, with the reduction in force: a mean over each completion's own length bends most gradients."""
    if proximal and facts.still and updates == 1:
        return "Does nothing: with one update per batch (num_iterations 1) its gradient is exactly 0 at any beta."
    if proximal and facts.off_policy.follows.factor <= 0:
        return "A proximal term that follows neither KL to the sampler."
    if proximal:
        return "A proximal term: holds the later updates of a batch near who drew it, and the run to nothing."
    one, whole, (least, most) = facts.position.follows, facts.sequence.follows, facts.kept
    if one.name == "zero":
        rest = f"; under {reduction} what is left pulls on the length of completions alone" if least < 1 else ""
        return f"Regularises nothing: its expected gradient, summed over tokens, is zero{rest}."
    if one.name not in ("reverse", "forward", JS) or one.factor < 0:
        return f"Follows neither KL: {describe_cosine(facts.position)}."
    reach = "over whole completions" if whole.name == one.name != JS else "token by token"
    under = f", bent by {reduction} (cosine {least:.3f} to {most:.3f} with the sum over tokens, by world)"
    return f"Pulls the policy along the gradient of {one.in_words}, {reach}{under if least < STRAIGHT else ''}."


def _value(term: KLTerm, facts: ConfigFacts, direction: Direction) -> str:
    if math.isnan(facts.value_bias):
        where = f"it stands in the {term.placement}, not in the loss"
        return f"k1, an unbiased sample of KL(policy||ref){_bounds(term)}; {where}"
    right = abs(facts.value_bias) < 1e-9
    off = "unbiased for" if right else f"{100 * facts.value_bias:+.1f} % off, in the worlds measured,"
    return f"{term.value}, in nats: {off} {MEASURED[direction]}, tokens of the policy{_bounds(term) if right else ''}"


def _bounds(term: KLTerm, *, weighed: bool = False) -> str:
    """Up to where a sentence holds that names a value or a gradient exactly: the worlds measured pass no far bound."""
    bounds = list[str]()
    if term.max_log_ratio is not None and not term.of_prefixes:
        bounds.append(f"no log-ratio passes {term.max_log_ratio:g} nats")
    if weighed and term.max_weight is not None and term.off_policy != "none":
        bounds.append(f"no weight passes {term.max_weight:g}")
    return f", while {' and '.join(bounds)}" if bounds else ""


def describe_pull(pull: Pull, bounds: str = "") -> str:
    """Which divergence's gradient is followed, with its cosines where that is no whole divergence."""
    follows = pull.follows
    if follows.name == "zero":
        return "an expected gradient of exactly zero"
    if not follows.factor:
        return f"the gradient of neither KL: {describe_cosine(pull)}"
    partial = "" if follows.name in ("reverse", "forward", JS) else f"; {describe_cosine(pull)}"
    return f"exactly the gradient of {follows.in_words}{bounds}{partial}"


def describe_cosine(pull: Pull) -> str:
    """How well a gradient points along that of KL(policy||ref), in each of the worlds measured."""
    low, high = (f"{each:.3f}" for each in pull.cosines)
    return f"cosine {low if low == high else f'{low} to {high}'} with KL(policy||ref) in the worlds measured"


def _advice(term: KLTerm, facts: ConfigFacts) -> str:
    """What corrects a gradient that is neither KL's for tokens of an older policy."""
    if facts.off_policy.follows.factor or facts.off_policy.follows.name == "zero":
        return ""
    if term.placement != "loss":
        return "; the KL in it is that of the policy that sampled, and goes stale with every further update"
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


def far_faults(function: KLFunction, use: Use = "loss", *, moves: bool) -> str:
    """What is wrong with a token at +-30 nats, and in which floating-point types; `moves`: it has to pull back."""
    found: dict[str, list[str]] = {}
    for dtype, far in product(DTYPES, (FAR, -FAR)):
        value, slope = one_token(function, dtype, far, use)
        faults = [f"the {name} is {x}" for name, x in (("value", value), ("gradient", slope)) if not math.isfinite(x)]
        if moves and slope * far <= 0:
            faults.append(f"the gradient {'pushes away from the reference' if slope else 'is zero'}")
        if faults:
            found.setdefault(f"at {far:+g} nats {faults[0]}", []).append(str(dtype).removeprefix("torch."))
    return "; ".join(f"{fault} ({', '.join(types)})" for fault, types in found.items())


EXACT = "sum_v policy_v (log policy_v - log ref_v)"
SLOPES: Mapping[tuple[str, str], str] = {
    ("token", "reverse"): "{w}delta_t",
    ("token", "forward"): "{w}(1 - exp(-delta_t))",
    ("sequence", "reverse"): "({w}delta_t + sum over later j of {later}_j)",
    ("sequence", "forward"): "({w}1 - product over j <= t of ref_j/{by}_j)",
}
"""(horizon, gradient) -> the coefficient of grad log policy_t; that of an own gradient is in `ESTIMATORS`."""


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
    if kl.kl_estimator == "exact":
        value = EXACT
        slope = "grad " + ("sum_v ref_v (log ref_v - log policy_v)" if kl.kl_gradient == "forward" else EXACT)
        slope += ", and sum over later j of exact_j times grad log policy_t" * (kl.kl_horizon == "sequence")
    else:
        row = ESTIMATORS[kl.kl_estimator]
        value, own = row.formula.replace("delta", "delta_t"), "{w}" + row.slope.replace("delta", "delta_t")
        weight, where = {
            "none": ("", ""),
            "token": ("w_t ", ", w_t = policy_t/sampler_t"),
            "sequence": ("rho_t ", ", rho_t = product of policy/sampler up to t"),
        }[kl.kl_off_policy]
        value = f"{weight}({value}){where}" if weight else value
        later, by = "k3" if kl.kl_estimator == "k3" else "delta", "policy"
        if weight:
            later, by = f"rho_j {later}", "sampler"
        slope = own if kl.kl_gradient == "own" else SLOPES.get((kl.kl_horizon, kl.kl_gradient), "")
        slope = slope.format(w=weight, later=later, by=by) + " grad log policy_t"
    slope = "0" if kl.kl_gradient == "none" else slope
    return [added, f"penalty_t = {value}", f"gradient of penalty_t = {slope}{gate}"]


MOVING = ("ema", "periodic", "live")
"""Anchors that are made of the policy again and again."""


def where_it_ends(kl: KLConfig, loss: LossConfig, teacher: TeacherConfig | None, who: str, *, rewarded: bool) -> str:
    """The fixed point of the expected update in the largest world of `klamp verify convergence`, held to `who`."""
    held, moved = who != "teacher", teacher is not None and teacher.teacher_schedule != "constant"
    moved |= held and (kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.reference in MOVING)
    if moved or (teacher is not None and teacher.kind in MOVING):
        return "not known: a coefficient moves, or an anchor with the policy"
    world = worlds()[-1] if rewarded else Scene(chain=worlds()[-1].chain)
    taught = None if teacher is None else bare_teacher(teacher, COEF)
    end = follow(replace(bare_term(kl), beta=BETA) if held else NO_KL, loss, world, taught)
    coefficients = [f"beta {BETA:g}"] * held + [f"teacher_coef {COEF:g}"] * (teacher is not None)
    at = f"completions of up to {world.chain.length} tokens, all counted, {', '.join(coefficients)}"
    if not end.stands:
        return f"nowhere: {end.kl:.2g} nats from the {who.replace('ref', 'reference')} it is still moving ({at})"
    if not rewarded:
        return f"{'at' if end.exact else f'{end.distance:.2g} nats from'} the {who} ({at})"
    target = f"{who} exp(reward / price)"
    if end.exact:
        return f"at the optimum of E[reward] - price KL(policy||{who}): {target} ({at})"
    away = f"{end.distance:.2g} nats from the optimum {target}"
    if loss.scale == "std":
        away = f"{end.nearest:.2g} nats from the nearest optimum {target}, price {end.price:.2g}"
    against = f"KL {end.kl:.2f} against {end.optimal_kl:.2f}, length {end.length:.2f} against {end.optimal_length:.2f}"
    return f"{away}: {against} ({at})"


class Form(NamedTuple):
    """A formula that is passed around as a KL, and how it is used."""

    found: str
    """Where it is printed; see docs/sources.md."""
    prints: str
    function: KLFunction | None
    """The formula of log policy and log ref, token by token; None: the sum over the whole vocabulary."""
    instead: str
    """What it is in klamp, and how to have what is wanted there."""
    use: Use = "loss"
    """Whether it is differentiated there as a loss, or taken from the reward."""

    @property
    def value(self) -> Loss:
        """The formula over the oracle's outcomes."""
        return exact if self.function is None else as_loss(self.function)


FORMS: Mapping[str, Form] = {
    "k1-as-loss": Form(
        "the from-scratch guide",
        "log policy - log ref, its mean times kl_coef is added to the loss",
        lambda policy, ref: policy - ref,
        "kl_estimator='k1', kl_gradient='own'; with kl_gradient='reverse' the same value has the gradient it lacks",
    ),
    "minus-k1": Form(
        "the Tinker guide",
        "kl_coef * (log ref - log policy) is added to the loss",
        lambda policy, ref: ref - policy,
        "no such term; kl_estimator='k1' with kl_gradient='reverse' has the right sign, and the value's gradient",
    ),
    "ratio-weighted": Form(
        "the GRPO tutorial",
        "exp(log policy - log ref) * (log policy - log ref), summed over tokens, is taken from the reward",
        lambda policy, ref: (policy - ref).exp() * (policy - ref),
        "no such term; use kl_estimator='k1' with kl_placement='reward' and kl_horizon='sequence', or "
        "kl_estimator='exact' in the loss, as in the tutorial's hands-on example (klamp explain exact-kl)",
        use="reward",
    ),
    "exact-kl": Form(
        "the hands-on example of the GRPO tutorial",
        "sum over the vocabulary of policy * (log policy - log ref), at each position, as the KL",
        None,
        "kl_estimator='exact'",
    ),
    "k3-as-loss": Form(
        "the k3 bug report, from TRL",
        "exp(log ref - log policy) - (log ref - log policy) - 1, times beta, is added to the loss",
        lambda policy, ref: (ref - policy).exp() - (ref - policy) - 1,
        "kl_estimator='k3', kl_gradient='own'; with kl_gradient='reverse' the same value has its own gradient",
    ),
}


def explain_form(name: str) -> Explanation:
    """Explains what a printed formula is and does; every number is measured by enumeration.

    Args:
        name: `k1-as-loss`, `minus-k1`, `ratio-weighted`, `exact-kl` or `k3-as-loss`.

    Raises:
        UnknownNameError: there is no such formula; names the nearest.
    """
    check_name("printed formula", name, FORMS)
    form, positions = FORMS[name], random_positions(3)
    loss = in_reward(form.value) if form.use == "reward" else form.value
    value, pull = judge_value(form.value, positions), expected_pull(positions, loss)
    swapped = [expected(replace(world, sampler_logits=world.ref_logits), form.value).item() for world in positions]
    under_ref = sum(swapped) / len(swapped)
    whole = expected_pull([random_chain(seed, vocab=3, length=3) for seed in range(4)], loss)
    moves = pull.follows.name != "zero"
    faults = "" if form.function is None else far_faults(form.function, form.use, moves=moves)
    lines: list[Line] = [
        ("prints", form.prints),
        ("found in", f"{form.found} (docs/sources.md)"),
        ("value", f"{value.expected:+.4f} nats per token where KL(policy||ref) is {value.reverse_kl:+.4f}"),
        ("", f"with tokens of the reference {under_ref:+.4f}"),
        ("pull", f"at one position {describe_pull(pull)}"),
        ("sequence", f"over whole completions, of up to 3 tokens: {describe_pull(whole)}"),
        *([("at 30 nats", faults)] if faults else []),
        ("in klamp", form.instead),
    ]
    gradient = f"it follows the gradient of {pull.follows.in_words}"
    still = "the expected gradient is zero, so it regularises nothing"
    verdict = f"{_value_verdict(value, under_ref)}; {gradient if moves else still}."
    return Explanation(name=name, verdict=verdict, lines=tuple(lines), cautions=())


def _value_verdict(value: ValueFinding, under_ref: float) -> str:
    if value.estimates == "KL(policy||ref)":
        return "the value is right"
    if value.estimates == "minus KL(policy||ref)":
        return "the sign is wrong, a reward for leaving the reference"
    if abs(under_ref - value.reverse_kl) < TOLERANCE:
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"
