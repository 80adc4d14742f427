"""Formulas that are passed around as a KL, as they are printed, and explained in words by what was measured of them.

>>> explain_form("k1-as-loss").verdict
'k1 as a loss: the value is right; the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klamp.errors import check_name
from klamp.verify.explain import Explanation, Line, describe_cosine, describe_pull
from klamp.verify.judge import KLFunction, Use, ValueFinding, as_loss, far_faults, judge_value, probe_far
from klamp.verify.oracle import TOLERANCE, Loss, Pull, expected, expected_pull, in_reward
from klamp.verify.worlds import Outcomes, random_chain, random_positions


@dataclass(frozen=True, kw_only=True)
class Form:
    """A formula that is passed around as a KL, and how it is used."""

    name: str
    """Its name on the command line."""
    found: str
    """Where it is printed; see docs/sources.md."""
    prints: str
    """What is printed there."""
    function: KLFunction | None
    """The formula of log policy and log ref, token by token; None: the sum over the whole vocabulary."""
    use: Use
    """Whether it is differentiated there as a loss, or taken from the reward."""
    called: str
    """What the formula is called; what it does is measured."""
    instead: str
    """How to have in klamp what is wanted there."""
    config: str
    """The fields of `KLConfig` that are this formula; empty where klamp has no such term."""

    @property
    def value(self) -> Loss:
        """The formula over the oracle's outcomes."""
        return exact_form if self.function is None else as_loss(self.function)

    @property
    def loss(self) -> Loss:
        """The formula as it is used: differentiated, or taken from the reward."""
        return in_reward(self.value) if self.use == "reward" else self.value


def exact_form(y: Outcomes) -> Tensor:
    """The exact KL of each position, from the whole rows of both models."""
    log_policy, log_ref = y.policy_logits.log_softmax(-1), y.ref_logits.log_softmax(-1)
    return torch.where(y.mask, (log_policy.exp() * (log_policy - log_ref)).sum(-1), 0.0)


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(
            name="k1-as-loss",
            found="the from-scratch guide",
            prints="log policy - log ref, its mean times kl_coef is added to the loss",
            function=lambda policy, ref: policy - ref,
            use="loss",
            called="k1 as a loss",
            instead="kl_estimator='k1' with kl_gradient='reverse': the same value, with the gradient that it lacks",
            config="kl_estimator='k1', kl_gradient='own'",
        ),
        Form(
            name="minus-k1",
            found="the Tinker guide",
            prints="kl_coef * (log ref - log policy) is added to the loss",
            function=lambda policy, ref: ref - policy,
            use="loss",
            called="minus k1 as a loss",
            instead="kl_estimator='k1' with kl_gradient='reverse' (the value with the right sign, and its gradient)",
            config="",
        ),
        Form(
            name="ratio-weighted",
            found="the GRPO tutorial",
            prints="exp(log policy - log ref) * (log policy - log ref), summed over tokens, is taken from the reward",
            function=lambda policy, ref: (policy - ref).exp() * (policy - ref),
            use="reward",
            called="k1 weighted by policy/ref, in the reward",
            instead="kl_estimator='k1' with kl_placement='reward' and kl_horizon='sequence', or kl_estimator='exact' "
            "in the loss, as in the tutorial's hands-on example (klamp explain exact-kl)",
            config="",
        ),
        Form(
            name="exact-kl",
            found="the hands-on example of the GRPO tutorial",
            prints="sum over the vocabulary of policy * (log policy - log ref), at each position, as the KL",
            function=None,
            use="loss",
            called="the exact KL of each position",
            instead="nothing: this is kl_estimator='exact'",
            config="kl_estimator='exact'",
        ),
        Form(
            name="k3-as-loss",
            found="the k3 bug report, from TRL",
            prints="exp(log ref - log policy) - (log ref - log policy) - 1, times beta, is added to the loss",
            function=lambda policy, ref: (ref - policy).exp() - (ref - policy) - 1,
            use="loss",
            called="k3 as a loss",
            instead="kl_estimator='k3' with kl_gradient='reverse': the same value and the gradient to it",
            config="kl_estimator='k3', kl_gradient='own'",
        ),
    )
}
"""Name of a formula -> the formula."""


def explain_form(name: str) -> Explanation:
    """Explains what a printed formula is and does; every number is measured by enumeration.

    Args:
        name: `k1-as-loss`, `minus-k1`, `ratio-weighted`, `exact-kl` or `k3-as-loss`.

    Raises:
        UnknownNameError: there is no such formula; names the nearest.
    """
    check_name("printed formula", name, FORMS)
    form, positions = FORMS[name], random_positions(3)
    value, pull = judge_value(form.value, positions), expected_pull(positions, form.loss)
    of_ref = [expected(replace(world, sampler_logits=world.ref_logits), form.value).item() for world in positions]
    under_ref = sum(of_ref) / len(of_ref)
    whole = expected_pull([random_chain(seed, vocab=3, length=3) for seed in range(4)], form.loss)
    far = () if form.function is None else probe_far(form.function, form.use)
    faults = far_faults([probe for probe in far if not (probe.finite and probe.alive)])
    lines: list[Line] = [
        ("prints", form.prints),
        ("found in", f"{form.found} (docs/sources.md)"),
        ("value", _value(value)),
        ("", _under_ref(value, under_ref)),
        ("pull", describe_pull(pull)),
        ("sequence", _sequence(whole)),
        *([("at 30 nats", "; ".join(faults))] if faults else []),
        ("in klamp", form.config or "no such term: preset() refuses it, with the reason"),
        ("instead", form.instead),
    ]
    verdict = f"{form.called}: {_value_verdict(value, under_ref)}; {_gradient_verdict(pull)}."
    return Explanation(name=form.name, verdict=verdict, lines=tuple(lines), cautions=())


def _value_verdict(value: ValueFinding, under_ref: float) -> str:
    if value.estimates == "KL(policy||ref)":
        return "the value is right"
    if value.estimates == "minus KL(policy||ref)":
        return "the sign is wrong, a reward for leaving the reference"
    if _is_kl(under_ref, value):
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"


def _is_kl(number: float, value: ValueFinding) -> bool:
    return abs(number - value.reverse_kl) < TOLERANCE


def _gradient_verdict(pull: Pull) -> str:
    if pull.follows.name == "zero":
        return "the expected gradient is zero, so it regularises nothing"
    return f"it follows the gradient of {pull.follows.in_words}"


def _value(value: ValueFinding) -> str:
    text = f"{value.expected:+.4f} nats per token where KL(policy||ref) is {value.reverse_kl:+.4f}"
    if value.estimates == "KL(policy||ref)":
        return f"{text}: right and unbiased, tokens of the policy"
    if value.estimates == "minus KL(policy||ref)":
        return f"{text}: minus the KL; the further the policy leaves, the lower the loss"
    return f"{text}: {100 * value.relative_bias:+.0f} %, tokens of the policy"


def _under_ref(value: ValueFinding, under_ref: float) -> str:
    text = f"tokens of the reference instead: {under_ref:+.4f}"
    if _is_kl(under_ref, value) and value.estimates != "KL(policy||ref)":
        return f"{text}, which is KL(policy||ref): the formula belongs to the other sampler"
    return text


def _sequence(pull: Pull) -> str:
    if pull.follows.name == "zero":
        return "nothing of the gradient of KL(policy||ref) over whole completions"
    return f"over whole completions, of up to 3 tokens, {describe_cosine(pull)}"
