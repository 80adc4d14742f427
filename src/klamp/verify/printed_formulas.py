"""Formulas that are passed around as a KL, as they are printed, and explained in words by what was measured of them.

>>> explain_form("k1-as-loss").verdict
'the value is right; the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import check_name
from klamp.verify.explain import Explanation, Line, describe_pull
from klamp.verify.judge import KLFunction, Use, ValueFinding, as_loss, far_faults, judge_value, probe_far
from klamp.verify.oracle import TOLERANCE, Loss, expected, expected_pull, in_reward
from klamp.verify.worlds import Outcomes, random_chain, random_positions


class Form(NamedTuple):
    """A formula that is passed around as a KL, and how it is used."""

    found: str
    """Where it is printed; see docs/sources.md."""
    prints: str
    """What is printed there."""
    function: KLFunction | None
    """The formula of log policy and log ref, token by token; None: the sum over the whole vocabulary."""
    instead: str
    """What it is in klamp, and how to have what is wanted there."""
    use: Use = "loss"
    """Whether it is differentiated there as a loss, or taken from the reward."""

    @property
    def value(self) -> Loss:
        """The formula over the oracle's outcomes."""
        return exact_form if self.function is None else as_loss(self.function)


def exact_form(y: Outcomes) -> Tensor:
    """The exact KL of each position, from the whole rows of both models."""
    log_policy, log_ref = y.policy_logits.log_softmax(-1), y.ref_logits.log_softmax(-1)
    return torch.where(y.mask, (log_policy.exp() * (log_policy - log_ref)).sum(-1), 0.0)


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
    loss = in_reward(form.value) if form.use == "reward" else form.value
    value, pull = judge_value(form.value, positions), expected_pull(positions, loss)
    swapped = [expected(replace(world, sampler_logits=world.ref_logits), form.value).item() for world in positions]
    under_ref = sum(swapped) / len(swapped)
    whole = expected_pull([random_chain(seed, vocab=3, length=3) for seed in range(4)], loss)
    far = () if form.function is None else probe_far(form.function, form.use)
    faults = far_faults([probe for probe in far if not (probe.finite and probe.alive)])
    lines: list[Line] = [
        ("prints", form.prints),
        ("found in", f"{form.found} (docs/sources.md)"),
        ("value", f"{value.expected:+.4f} nats per token where KL(policy||ref) is {value.reverse_kl:+.4f}"),
        ("", f"with tokens of the reference {under_ref:+.4f}"),
        ("pull", f"at one position {describe_pull(pull)}"),
        ("sequence", f"over whole completions, of up to 3 tokens: {describe_pull(whole)}"),
        *([("at 30 nats", "; ".join(faults))] if faults else []),
        ("in klamp", form.instead),
    ]
    gradient = f"it follows the gradient of {pull.follows.in_words}"
    if pull.follows.name == "zero":
        gradient = "the expected gradient is zero, so it regularises nothing"
    verdict = f"{_value_verdict(value, under_ref)}; {gradient}."
    return Explanation(name=name, verdict=verdict, lines=tuple(lines), cautions=())


def _value_verdict(value: ValueFinding, under_ref: float) -> str:
    if value.estimates == "KL(policy||ref)":
        return "the value is right"
    if value.estimates == "minus KL(policy||ref)":
        return "the sign is wrong, a reward for leaving the reference"
    if abs(under_ref - value.reverse_kl) < TOLERANCE:
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"
