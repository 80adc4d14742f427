"""Formulas that are passed around as a KL, explained in words by what was measured of them.

>>> explain_form("k1-as-loss").verdict
'k1 as a loss: the value is right, the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

from klamp.verify.explain import Explanation, Line
from klamp.verify.oracle import TOLERANCE
from klamp.verify.printed import FormFacts, measure_form


def explain_form(name: str) -> Explanation:
    """Explains what a printed formula is and does; every number is measured by enumeration.

    Args:
        name: `k1-as-loss`, `minus-k1`, `ratio-weighted`, `exact-kl` or `k3-as-loss`; or an old name of it.

    Raises:
        UnknownNameError: there is no such formula.
    """
    facts = measure_form(name)
    form = facts.form
    lines: list[Line] = [
        ("prints", form.prints),
        ("found in", f"{form.found} (docs/sources.md)"),
        ("value", _value(facts)),
        ("", _under_ref(facts)),
        ("pull", _pull(facts)),
        *_off_policy(facts),
        ("sequence", _sequence(facts)),
        *_faults(facts),
        ("in klamp", form.config or "no such term: preset() refuses it, with the reason"),
        ("instead", form.instead),
    ]
    verdict = f"{form.called}: {_value_verdict(facts)}; {_gradient_verdict(facts)}."
    return Explanation(name=form.name, verdict=verdict, lines=tuple(lines), cautions=())


def _value_verdict(facts: FormFacts) -> str:
    if abs(facts.bias) < TOLERANCE:
        return "the value is right"
    if abs(facts.bias + 2) < TOLERANCE:
        return "the sign is wrong, a reward for leaving the reference"
    if abs(facts.value_under_ref - facts.reverse_kl) < TOLERANCE:
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"


def _gradient_verdict(facts: FormFacts) -> str:
    if facts.follows.name == "zero":
        return "the expected gradient is zero, so it regularises nothing"
    if facts.follows.factor:
        return f"it follows the gradient of {facts.follows.in_words}"
    return "it follows the gradient of neither KL"


def _value(facts: FormFacts) -> str:
    text = f"{facts.value:+.4f} nats per token where KL(policy||ref) is {facts.reverse_kl:+.4f}"
    if abs(facts.bias) < TOLERANCE:
        return f"{text}: right and unbiased, tokens of the policy"
    if abs(facts.bias + 2) < TOLERANCE:
        return f"{text}: minus the KL; the further the policy leaves, the lower the loss"
    return f"{text}: {100 * facts.bias:+.0f} %, tokens of the policy"


def _under_ref(facts: FormFacts) -> str:
    text = f"tokens of the reference instead: {facts.value_under_ref:+.4f}"
    if abs(facts.value_under_ref - facts.reverse_kl) < TOLERANCE and abs(facts.bias) > TOLERANCE:
        return f"{text}, which is KL(policy||ref): the formula belongs to the other sampler"
    return text


def _pull(facts: FormFacts) -> str:
    if facts.follows.name == "zero":
        return f"none: the expected gradient is zero (norm {facts.size:.0e} of that of KL(policy||ref)), on-policy"
    cosines = f"cosine {facts.cosine_reverse:.3f} with KL(policy||ref), {facts.cosine_forward:.3f} with KL(ref||policy)"
    if facts.follows.factor:
        return f"exactly the gradient of {facts.follows.in_words}, one position ({cosines})"
    return f"the gradient of neither KL: {cosines}, {facts.size:.3g} times the size of KL(policy||ref)'s, one position"


def _sequence(facts: FormFacts) -> str:
    if facts.sequence_cosine == 0:
        return "nothing of the gradient of KL(policy||ref) over whole completions"
    return (
        f"cosine {facts.sequence_cosine:.3f} with the gradient of KL(policy||ref) over whole completions, "
        f"{100 * facts.sequence_share:.0f} % of its length (measured at up to 3 tokens)"
    )


def _off_policy(facts: FormFacts) -> list[Line]:
    """The sentence on tokens of an older policy, where the formula pulls towards or away from that policy alone."""
    if facts.form.use == "reward" or facts.stray > TOLERANCE:
        return []
    if facts.towards_sampler > 0:
        text = "raises the probability of every sampled token: it pulls towards that older policy"
    else:
        text = "lowers the probability of every sampled token: it pushes away from that older policy"
    return [("off-policy", f"tokens of an older policy: {text}, wherever the reference is")]


def _faults(facts: FormFacts) -> list[Line]:
    if facts.judged is None:
        return []
    found = [fault for fault in facts.judged.faults if fault.startswith("at ") and "pushes away" not in fault]
    return [("at 30 nats", "; ".join(found))] if found else []
