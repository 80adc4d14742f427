"""What a KL term does, in plain words: measured facts turned into sentences.

>>> from klamp.config import KLConfig, LossConfig
>>> explain_config(KLConfig(kl_gradient="forward"), LossConfig(), name="mine").verdict
'Pulls the policy along the gradient of KL(ref||policy), token by token.'
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import (
    describe_average,
    describe_clip,
    describe_controller,
    describe_movement,
    describe_price,
    describe_teacher,
)
from klamp.config.loss import Price, configured_price, kl_reduction
from klamp.config.rules import wide_clip
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.term import KLTerm, gates_on_itself
from klamp.core.types import Direction
from klamp.verify.config_facts import JS, LENGTH, NO_KL, ConfigFacts, measure_config
from klamp.verify.judge import far_faults
from klamp.verify.mixes import teacher_lines, where_it_ends
from klamp.verify.oracle import Pull

Line = tuple[str, str]
"""A label and a text."""

MEASURED: Mapping[Direction, str] = {"reverse": "KL(policy||ref)", "forward": "KL(ref||policy)", "js": JS}
STRAIGHT = 0.9999
"""Cosine from which a reduction is said to scale a gradient, and not to turn it."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a KL term does, ready to be printed."""

    name: str
    """The name of what was explained."""
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
    """Completions per prompt."""
    paper: str = ""
    """The paper that the recipe comes from."""
    rewarded: bool = True
    """Whether a reward is trained on."""
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
    """Verdict and lines of the KL to the reference or the sampler."""
    facts, reduction = measure_config(kl, loss, length=setting.length), kl_reduction(kl, loss)
    measured, proximal = _measured(kl, facts), kl.reference == "sampler"
    if kl.beta == 0:
        return "No pull: beta is 0; the KL is only measured and logged.", [x for x in measured if x[0] == "value"]
    lines = [("" if i else "equation", _towards(text, kl)) for i, text in enumerate(equations(kl, loss))]
    lines += [*measured, ("limits", _limits(kl, facts, setting))]
    if facts.probes:
        moves = facts.position.follows.name != "zero"
        faults = far_faults([probe for probe in facts.probes if moves or not probe.finite])
        lines.append(("at 30 nats", "; ".join(faults) or "finite in float32, bfloat16 and float16"))
    clipped = facts.gate is not None
    if setting.rewarded and facts.pays and not proximal:
        price = describe_price(setting.price(kl, loss), group_size=setting.group_size)
        lines.append(("price", price + ", above the budget" * clipped))
    if alone and not proximal and not clipped and not kl.excludes:
        lines.append(("ends", where_it_ends(kl, loss, None, "ref", rewarded=setting.rewarded)))
    verdict = verdict_of(facts, reduction, proximal=proximal, updates=setting.updates)
    return verdict + " Clipped: see limits." * clipped, lines


def _of_teacher(kl: KLConfig, loss: LossConfig, setting: Setting, teacher: TeacherConfig) -> tuple[str, list[Line]]:
    """Verdict and lines of the KL to a teacher, which a KL to the reference may stand beside."""
    facts, reduction = measure_config(NO_KL, loss, length=setting.length, teacher=teacher), kl_reduction(NO_KL, loss)
    head = " (a head of 1 in these worlds)" * (teacher.teacher_estimator == "topk" and teacher.teacher_top_k > 0)
    lines = [("teacher", f"{describe_teacher(teacher)}{head}"), *_measured(teacher, facts)]
    size = setting.group_size if setting.rewarded else 0
    if not size:
        loss = replace(loss, advantage_baseline="leave_one_out")  # nothing is compared
    held = kl.beta > 0 and kl.reference != "sampler"
    price = replace(setting, group_size=size or 2).price(kl, loss) if held else None
    more = teacher_lines(kl, loss, teacher, price, size=size)
    lines += [line for line in more if line[0] != "price" or facts.pays]
    return _towards(verdict_of(facts, reduction), teacher), lines


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
    if math.isnan(facts.value):
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


def _limits(kl: KLConfig, facts: ConfigFacts, setting: Setting) -> str:
    parts: list[str] = []
    if facts.gate is not None:
        clip, gate = describe_clip(kl, length=kl.kl_reference_length or setting.length), facts.gate
        budget = f" = {gate.budget:g} nats per completion" if kl.use_per_token_kl_threshold else ""
        at = ", ".join(f"{100 * factor:.3g} % at {size:g}" for size, factor in gate.at.items())
        none = "always open" if kl.kl_clip_method == "hard" else "half open at a KL of 0, further above"
        parts.append(f"{clip}{budget}; gate {f'open by KL in budgets: {at}' if gate.budget else none}")
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
COEFFICIENTS: Mapping[tuple[str, str], str] = {
    ("token", "reverse"): "{w}delta_t",
    ("token", "forward"): "{w}(1 - exp(-delta_t))",
    ("sequence", "reverse"): "({w}delta_t + sum over later j of {wj}{value}_j)",
    ("sequence", "forward"): "({w}1 - product over j <= t of ref_j/{by}_j)",
}
OWN: Mapping[str, str] = {
    "k1": "{w}1",
    "k2": "{w}delta_t",
    "k3": "{w}(1 - exp(-delta_t))",
    "abs": "{w}sign(delta_t)",
}
WEIGHTS: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "token": ("w_t ", ", w_t = policy_t/sampler_t"),
    "sequence": ("rho_t ", ", rho_t = product of policy/sampler up to t"),
}


def equations(kl: KLConfig, loss: LossConfig) -> list[str]:
    """The equations of a configuration's KL: what is added where, and its gradient; delta = log policy - log ref."""
    gate = "" if kl.kl_clip_method == "none" else f", times {_gate(kl)}"
    if kl.kl_placement == "reward" and gate:
        return [f"advantage = A[reward] - beta * A[sum_t delta_t]{gate}; A: how advantages are formed of rewards"]
    if kl.kl_placement == "reward":
        return ["reward = reward - beta * sum_t delta_t, before the advantages are formed"]
    if kl.kl_placement == "advantage":
        shift = "sum over j >= t of delta_j" if kl.kl_horizon == "sequence" else "delta_t"
        return [f"advantage_t = advantage_t - beta * {shift}{gate}, after the advantages are formed"]
    value, gradient = _penalty(kl)
    average = describe_average(kl_reduction(kl, loss))
    return [
        f"loss = policy loss + beta * R[penalty], R: {average}",
        f"penalty_t = {value}",
        f"gradient of penalty_t = {gradient}{gate}",
    ]


def _penalty(kl: KLConfig) -> tuple[str, str]:
    """The value of a token's penalty, and its gradient."""
    weight, where = WEIGHTS[kl.kl_off_policy]
    if kl.kl_estimator == "exact":
        turned = "sum_v ref_v (log ref_v - log policy_v)" if kl.kl_gradient == "forward" else EXACT
        later = ", and sum over later j of exact_j times grad log policy_t" if kl.kl_horizon == "sequence" else ""
        return EXACT, "0" if kl.kl_gradient == "none" else f"grad {turned}{later}"
    formula = ESTIMATORS[kl.kl_estimator].formula.replace("delta", "delta_t")
    value = f"{weight}({formula}){where}" if weight else formula
    if kl.kl_gradient == "none":
        return value, "0"
    slope = OWN[kl.kl_estimator] if kl.kl_gradient == "own" else COEFFICIENTS[kl.kl_horizon, kl.kl_gradient]
    wj, by = ("rho_j ", "sampler") if weight else ("", "policy")
    summed = "k3" if kl.kl_estimator == "k3" else "delta"
    return value, f"{slope.format(w=weight, wj=wj, value=summed, by=by)} grad log policy_t"


def _gate(kl: KLConfig) -> str:
    own = gates_on_itself(kl.kl_estimator, kl.kl_gradient, kl.kl_horizon, kl.kl_off_policy)
    others = f"{' other' * (not own)} completions, their mean,"
    whose = {"sequence": "completion", "group": f"prompt's{others}"}.get(kl.clip_level, f"batch's{others}")
    if kl.kl_clip_method == "hard":
        return f"1 where the KL of the {whose} is above the budget, 0 below" if kl.kl_clip_threshold else "1"
    return f"sigmoid((KL of the {whose} - budget) / {kl.kl_clip_temperature:g})"
