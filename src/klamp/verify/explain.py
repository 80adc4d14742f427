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
from klamp.verify.config_facts import JS, LENGTH, NO_KL, ClipFacts, ConfigFacts, measure_config
from klamp.verify.explain_anchors import MOVES, moves, sampler_end, teacher_lines, trust_region, where_it_ends
from klamp.verify.judge import far_faults
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
    """Updates on each batch of completions; None: nobody says."""
    success: float | None = None
    """How often the teacher solves a prompt; None: nobody says."""


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
    setting = setting or Setting()
    taught = teacher if teacher is not None and teacher.there else None
    paper, trust = [("paper", setting.paper)] if setting.paper else [], trust_region(loss)
    if not kl.needs_reference and taught is None:
        text = "No KL: beta is 0, no reference is loaded, and it costs nothing."
        lines = [("monitor", "kl_monitor=True loads a reference, and measures the KL all the same"), *trust, *paper]
        return Explanation(name=name, verdict=text, lines=tuple(lines), cautions=())
    verdicts, lines, proximal = list[str](), list[Line](), kl.reference == "sampler"
    if kl.needs_reference:
        facts = measure_config(kl, loss, length=setting.length)
        verdict = _of_sampler(facts, setting) if proximal else verdict_of(facts, kl_reduction(kl, loss))
        unused = kl.beta == 0
        verdict += "" if facts.gate is None else " Clipped: see limits."
        verdicts.append("No pull: beta is 0; the KL is only measured and logged." if unused else verdict)
        formed = [("equation" if i == 0 else "", _towards(text, kl)) for i, text in enumerate(equations(kl, loss))]
        measured = _measured(kl, kl_reduction(kl, loss), facts)
        if unused:
            lines += [line for line in measured if line[0] == "value"]
        else:
            lines += [*formed, *measured, ("limits", _limits(kl, facts, setting)), *_numbers(facts)]
        if setting.rewarded and facts.pays and not proximal and not unused:
            price = describe_price(_price(kl, loss, setting), group_size=setting.group_size)
            lines.append(("price", price + ", above the budget" * (facts.gate is not None)))
        alone = taught is None and not unused
        if proximal and alone and facts.still:
            lines.append(("ends", sampler_end(kl, loss)))
        elif not proximal and alone and kl.kl_clip_method == "none" and not kl.excludes:
            ends = MOVES if moves(kl) else where_it_ends(kl, loss, None, "ref", rewarded=setting.rewarded)
            lines.append(("ends", ends))
    if taught is not None:
        topk = taught.teacher_estimator == "topk" and taught.teacher_top_k > 0
        facts = measure_config(NO_KL, loss, length=setting.length, teacher=taught)
        verdicts.append(_towards(verdict_of(facts, kl_reduction(NO_KL, loss)), taught))
        lines += [
            ("teacher", f"{describe_teacher(taught)}{' (a head of 1 in these worlds)' * topk}"),
            *_measured(taught, kl_reduction(NO_KL, loss), facts),
        ]
        size = setting.group_size if setting.rewarded else 0
        around = loss if size else replace(loss, advantage_baseline="leave_one_out")  # nothing is compared
        held = kl.beta > 0 and not proximal
        price = _price(kl, around, replace(setting, group_size=size or 2)) if held else None
        told = teacher_lines(kl, around, taught, price, size=size, success=setting.success)
        lines += [line for line in told if line[0] != "price" or facts.pays]
    control = [("control", f"beta {describe_controller(kl)}")] if kl.needs_reference else []
    lines += [*trust, *control, *_moving(kl), *paper]
    wide = [] if kl.kl_reference_length else [wide_clip(kl, setting.length)]  # the length is that of the explanation
    theirs = () if taught is None else taught.cautions()
    cautions = tuple(dict.fromkeys(filter(None, (*kl.cautions(), *wide, *_not_measured(kl), *theirs))))
    return Explanation(name=name, verdict=" ".join(verdicts), lines=tuple(lines), cautions=cautions)


def _measured(anchor: KLConfig | TeacherConfig, reduction: str, facts: ConfigFacts) -> list[Line]:
    """What the KL to an anchor does by itself; the policy's own tokens say nothing of the sampler."""
    term = anchor.build_term()
    lines = [
        ("value", _value(term, facts, "reverse" if isinstance(anchor, KLConfig) else anchor.teacher_direction)),
        ("pull", describe_pull(facts.position) + _within(term, facts.position)),
        ("sequence", _sequence(term, facts)),
        ("in the loss", _in_loss(reduction, facts)),
        ("off-policy", _off_policy(term, facts)),
        ("noise", _noise(facts)),
    ]
    if term.anchor == "reference":
        return lines
    still = "exactly 0 in every sample" if facts.still else "not 0 in every sample"
    if term.anchor == "sampler":
        lines = [("pull", f"first update of a batch: {still}, at any beta"), lines[4]]
    else:
        del lines[2]  # in the loss says it of the reduction in force
        lines.append(("at teacher", f"the gradient is {still} where the policy is the teacher"))
    return [(label, _towards(text, anchor)) for label, text in lines]


def _towards(text: str, anchor: KLConfig | TeacherConfig) -> str:
    """A sentence on the reference, said of another anchor."""
    who = "teacher" if isinstance(anchor, TeacherConfig) else "sampler" if anchor.reference == "sampler" else "ref"
    return re.sub(r"\bref(?=\b|_)", who, text)


def _of_sampler(facts: ConfigFacts, setting: Setting) -> str:
    """The verdict on a proximal term."""
    if facts.still and setting.updates == 1:
        return "Does nothing: with one update per batch (num_iterations 1) its gradient is exactly 0 at any beta."
    if facts.off_policy.follows.factor <= 0:
        return "A proximal term that follows neither KL to the sampler."
    return "A proximal term: holds the later updates of a batch near who drew it, and the run to nothing."


def verdict_of(facts: ConfigFacts, reduction: str) -> str:
    """What it does, with the reduction in force: a mean over each completion's own length bends most gradients."""
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
    within = _within(term, facts.position)
    if math.isnan(facts.value):
        return f"k1, an unbiased sample of KL(policy||ref){within}; it stands in the {term.placement}, not in the loss"
    if abs(facts.value_bias) < 1e-9:
        return f"{term.value}, in nats: unbiased for {MEASURED[direction]}, tokens of the policy{within}"
    off = f"{100 * facts.value_bias:+.1f} % off, in the worlds measured,"
    return f"{term.value}, in nats: {off} {MEASURED[direction]}, tokens of the policy"


def _within(term: KLTerm, pull: Pull, *, weighed: bool = False) -> str:
    """Up to where a sentence holds that names a value or a gradient exactly: the worlds measured pass no far bound."""
    bounds = list[str]()
    if term.max_log_ratio is not None and not term.of_prefixes:
        bounds.append(f"no log-ratio passes {term.max_log_ratio:g} nats")
    if weighed and term.max_weight is not None and term.off_policy != "none":
        bounds.append(f"no weight passes {term.max_weight:g}")
    return f", while {' and '.join(bounds)}" if bounds and pull.follows.factor else ""


def describe_pull(pull: Pull) -> str:
    """The sentence on one position: which divergence's gradient is followed, with its cosines."""
    if pull.follows.name == "zero":
        return "none: the expected gradient is exactly zero, tokens of the policy"
    if pull.follows.factor:
        return f"at one position exactly the gradient of {pull.follows.in_words}"
    return f"at one position the gradient of neither KL: {describe_cosine(pull)}"


def describe_cosine(pull: Pull) -> str:
    """How well a gradient points along that of KL(policy||ref), in each of the worlds measured."""
    low, high = (f"{each:.3f}" for each in pull.cosines)
    return f"cosine {low if low == high else f'{low} to {high}'} with KL(policy||ref) in the worlds measured"


def _sequence(term: KLTerm, facts: ConfigFacts) -> str:
    pull = facts.sequence
    if pull.follows.name == "zero":
        return "nothing of the gradient of KL(policy||ref) over whole completions"
    if pull.follows.name in ("reverse", "forward"):
        return f"exactly the gradient of {pull.follows.in_words} over whole completions{_within(term, pull)}"
    left_out = "; left out: what a token does to the KL of later tokens" if pull.follows.name == "local" else ""
    return f"over whole completions, of up to {LENGTH} tokens, {describe_cosine(pull)}{left_out}"


def _in_loss(reduction: str, facts: ConfigFacts) -> str:
    why = "every token counts the same"
    if reduction == "sequence_mean":
        why = "each completion's KL is divided by its own length, so that a token of a long one counts less"
    if facts.in_loss.follows.name == "zero":
        return f"{reduction}: {why}; zero"
    if facts.sequence.follows.name == "zero":
        return f"{reduction}: {why}; that division alone leaves a gradient"
    if (least := facts.kept[0]) < STRAIGHT:
        return f"{reduction}: {why}; cosine {least:.3f} to {facts.kept[1]:.3f} with the sum over tokens, by world"
    return f"{reduction}: {why}; it points where the sum over tokens does"


def _off_policy(term: KLTerm, facts: ConfigFacts) -> str:
    """The sentence on tokens of an older policy, as in the second update of a rollout."""
    pull, who = facts.off_policy, "tokens of an older policy (second update of a rollout)"
    if pull.follows.name in ("reverse", "forward", JS):
        within = _within(term, pull, weighed=True)
        return f"{who}: still exactly the gradient of {pull.follows.in_words} at one position{within}"
    if pull.follows.name == "zero":
        return f"{who}: zero"
    fix, proximal = "", term.anchor == "sampler" and term.gradient in ("reverse", "forward")
    if term.placement != "loss":
        fix = "; the KL in it is that of the policy that sampled, and goes stale with every further update"
    elif term.off_policy == "none" and (facts.position.follows.factor or proximal):
        cut = "" if term.max_weight is None else f", while no weight passes {term.max_weight:g}"
        fix = f"; {'teacher' if term.anchor == 'teacher' else 'kl'}_off_policy='{term.horizon}' corrects that{cut}"
    return f"{who}: neither KL, {describe_cosine(pull)}{fix}"


def _noise(facts: ConfigFacts) -> str:
    if facts.noise == 0:
        return "none: no completion has a gradient"
    if facts.noise == math.inf:
        return "all of its gradient is noise: the mean is zero"
    return f"the gradient of one completion scatters by {facts.noise:.2g} times its mean, in the worlds measured"


def _limits(kl: KLConfig, facts: ConfigFacts, setting: Setting) -> str:
    parts: list[str] = []
    if facts.gate is not None:
        parts.append(_clip(kl, facts.gate, setting))
    if kl.kl_max_log_ratio is not None and kl.kl_estimator != "exact":
        bound = kl.kl_max_log_ratio
        parts.append(f"log-ratio bounded at +-{bound:g} nats, straight-through: the gradient stays, at that size")
    summed = kl.kl_estimator == "exact" and kl.kl_off_policy == "token"
    if kl.kl_max_weight is not None and kl.kl_off_policy != "none" and not summed:
        parts.append(f"off-policy weight cut at {kl.kl_max_weight:g}: bounded noise, biased where it is cut")
    if kl.excludes:
        parts.append("some tokens carry no KL (kl_exclude_tokens): nothing holds them")
    return "; ".join(parts) or "none: no clip, and nothing is cut off"


def _not_measured(kl: KLConfig) -> list[str]:
    """The caution that names excluded tokens: a run leaves them out of the KL, the measurement does not."""
    if not kl.excludes:
        return []
    return [
        "kl_exclude_tokens: in a run the tokens named carry no KL, and nothing holds the policy there; here "
        "every gradient, value and share was measured with all tokens in the KL, since only the tokenizer knows which "
        "they are. Watch the KL of the kept tokens in the run (kl/k3)."
    ]


def _clip(kl: KLConfig, gate: ClipFacts, setting: Setting) -> str:
    clip = describe_clip(kl, length=kl.kl_reference_length or setting.length)
    budget = f" = {gate.budget:g} nats per completion" if kl.use_per_token_kl_threshold else ""
    at = ", ".join(f"{100 * factor:.3g} % at {size:g}" for size, factor in gate.at.items())
    none = "always open" if kl.kl_clip_method == "hard" else "half open at a KL of 0, further above"
    return f"{clip}{budget}; gate {f'open by KL in budgets: {at}' if gate.budget else none}"


def _numbers(facts: ConfigFacts) -> list[Line]:
    moves = facts.position.follows.name != "zero"
    faults = far_faults([probe for probe in facts.probes if moves or not probe.finite])
    fine = "finite in float32, bfloat16 and float16" + (", and pulling back" if moves else "")
    return [("at 30 nats", "; ".join(faults) or fine)] if facts.probes else []


def _price(kl: KLConfig, loss: LossConfig, setting: Setting) -> Price:
    size, length = setting.group_size, setting.length
    return configured_price(kl, loss, group_size=size, mean_length=length, max_length=setting.max_length or length)


def _moving(kl: KLConfig) -> list[Line]:
    """A reference that follows the policy holds it to where it was, not to where it began."""
    how = describe_movement(kl)
    return [("reference", f"{how}; a KL to it does not bound the distance from the start")] if how else []


EXACT = "sum_v policy_v (log policy_v - log ref_v)"

COEFFICIENTS: Mapping[tuple[str, str], str] = {
    ("token", "reverse"): "{w}delta_t",
    ("token", "forward"): "{w}(1 - exp(-delta_t))",
    ("sequence", "reverse"): "{w}delta_t + sum over later j of {wj}{value}_j",
    ("sequence", "forward"): "{w}1 - product over j <= t of ref_j/{by}_j",
}
OWN: Mapping[str, str] = {
    "k1": "{w}1",
    "k2": "{w}delta_t",
    "k3": "{w}(1 - exp(-delta_t))",
    "abs": "{w}sign(delta_t)",
}
WEIGHTS: Mapping[str, str] = {"none": "", "token": "w_t ", "sequence": "rho_t "}
WHERE: Mapping[str, str] = {
    "none": "",
    "token": ", w_t = policy_t/sampler_t",
    "sequence": ", rho_t = product of policy/sampler up to t",
}


def equations(kl: KLConfig, loss: LossConfig) -> list[str]:
    """The equations of a configuration's KL: what is added where, and its gradient; delta = log policy - log ref."""
    gates = [] if kl.kl_clip_method == "none" else [_gate_equation(kl)]
    if kl.kl_placement == "reward" and gates:
        formed = "advantage = A[reward] - beta * A[sum_t delta_t], A: how advantages are formed of rewards"
        return [formed, f"beta multiplied by {gates[0]}"]
    if kl.kl_placement == "reward":
        return ["reward = reward - beta * sum_t delta_t, before the advantages are formed"]
    if kl.kl_placement == "advantage":
        shift = "sum over j >= t of delta_j" if kl.kl_horizon == "sequence" else "delta_t"
        moved = f"advantage_t = advantage_t - beta * {shift}, after the advantages are formed"
        return [moved, *(f"beta multiplied by {gate}" for gate in gates)]
    return [
        f"loss = policy loss + beta * R[penalty], R: {describe_average(kl_reduction(kl, loss))}",
        f"penalty_t = {_value_equation(kl)}",
        f"gradient of penalty_t = {_gradient_equation(kl)}",
        *(f"gradient multiplied by {gate}" for gate in gates),
    ]


def _value_equation(kl: KLConfig) -> str:
    if kl.kl_estimator == "exact":
        return EXACT
    formula = ESTIMATORS[kl.kl_estimator].formula.replace("delta", "delta_t")
    if kl.kl_off_policy == "none":
        return formula
    return f"{WEIGHTS[kl.kl_off_policy]}({formula}){WHERE[kl.kl_off_policy]}"


def _gradient_equation(kl: KLConfig) -> str:
    weight = WEIGHTS[kl.kl_off_policy]
    if kl.kl_estimator == "exact" and kl.kl_gradient != "none":
        which = "sum_v ref_v (log ref_v - log policy_v)" if kl.kl_gradient == "forward" else EXACT
        later = ", and sum over later j of exact_j times grad log policy_t" if kl.kl_horizon == "sequence" else ""
        return f"grad {which}{later}"
    if kl.kl_gradient == "none":
        return "0"
    if kl.kl_gradient == "own":
        coefficient = OWN[kl.kl_estimator].format(w=weight)
    else:
        coefficient = COEFFICIENTS[kl.kl_horizon, kl.kl_gradient].format(
            w=weight,
            wj="rho_j " if weight else "",
            value="k3" if kl.kl_estimator == "k3" else "delta",
            by="sampler" if weight else "policy",
        )
    bare = " " not in coefficient or (coefficient.startswith("(") and coefficient.endswith(")"))
    return f"{coefficient if bare else f'({coefficient})'} grad log policy_t"


def _gate_equation(kl: KLConfig) -> str:
    own = gates_on_itself(kl.kl_estimator, kl.kl_gradient, kl.kl_horizon, kl.kl_off_policy)
    whose = {"sequence": "completion", "group": f"prompt's{' other' * (not own)} completions, their mean,"}.get(
        kl.clip_level, f"batch's{' other' * (not own)} completions, their mean,"
    )
    if kl.kl_clip_method == "hard":
        return f"1 where the KL of the {whose} is above the budget, 0 below" if kl.kl_clip_threshold else "1"
    return f"sigmoid((KL of the {whose} - budget) / {kl.kl_clip_temperature:g})"
