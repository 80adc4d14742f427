"""Judging a KL function that somebody else wrote or printed: what it estimates, whose gradient it has.

A `KLFunction` maps the log-probabilities of sampled tokens under policy and reference, both `[B, T]`, to one number
per token, `[B, T]`; any trainer's per-token KL fits this form. `judge` runs it through
the enumeration oracle in float64, with tokens sampled from the policy:

    >>> import torch
    >>> k3 = lambda policy, ref: torch.exp(ref - policy) - (ref - policy) - 1
    >>> judge(k3).value.estimates, judge(k3).gradient.follows.in_words
    ('KL(policy||ref)', 'KL(ref||policy)')
    >>> explain_form("k1-as-loss").verdict
    'the value is right; the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from klamp.core.estimators import exact_kl
from klamp.errors import ShapeError, check_name
from klamp.verify.oracle import Loss, Pull, expected, expected_pull, forward_kl, in_reward, reverse_kl, variance
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, random_chain, random_positions

Line: TypeAlias = tuple[str, str]
KLFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAR = 30.0
"""A large log-ratio, in nats, at which value and gradient are still to be right."""
TOLERANCE = 1e-5
"""Relative error up to which values are equal; functions that compute in float32 must still be recognised."""

Use: TypeAlias = Literal["loss", "reward"]


class ValueFinding(NamedTuple):
    """What the expected value of the function is, for tokens of the policy; nats per token, mean over the worlds."""

    estimates: str  # KL(policy||ref), KL(ref||policy), these with a minus, zero, or "neither KL"
    expected: float
    reverse_kl: float
    relative_bias: float  # (expected - KL(policy||ref)) / KL(policy||ref)
    standard_deviation: float  # of one token's value, root mean square over the worlds
    lowest: float  # value of any token; below 0 for k1 and its kin


class Judgement(NamedTuple):
    """What was found out about one function."""

    value: ValueFinding
    gradient: Pull


def judge(function: KLFunction, *, use: Use = "loss") -> Judgement:
    """Finds out what a per-token KL function estimates, and where its gradient points.

    Sampler: tokens come from the policy, and are enumerated, so that there is no sampling error.
    Value: E_policy[f] against KL(policy||ref) and KL(ref||policy).
    Gradient: with use `loss` the gradient of E_policy[f] at fixed tokens, as in a trainer; with use `reward` the score
    function's, E_policy[sg(f) grad log policy]. Descending it lowers the quantity that it follows.

    Args:
        function: (policy_logprobs [B, T] with gradient, ref_logprobs [B, T]) -> [B, T].
        use: whether a trainer differentiates it, or takes it from the reward.

    Raises:
        ShapeError: the function does not return one number per token.
        UnknownNameError: an unknown use.
    """
    check_name("use", use, get_args(Use))
    chains = random_positions(3)
    return Judgement(
        value=judge_value(as_loss(function), chains),
        gradient=expected_pull(chains, as_loss(function, use), tolerance=TOLERANCE),
    )


def as_loss(function: KLFunction, use: Use = "loss") -> Loss:
    """The function as a loss of enumerated completions, differentiated or taken from the reward."""

    def loss(outcomes: Outcomes) -> Tensor:
        return _call(function, outcomes.policy_logprobs, outcomes.ref_logprobs)

    return in_reward(loss) if use == "reward" else loss


def exact(y: Outcomes) -> Tensor:
    """The exact KL of each position, as a loss of enumerated completions."""
    return exact_kl(y.policy_logits, y.ref_logits)


def _call(function: KLFunction, policy: Tensor, ref: Tensor) -> Tensor:
    values = function(policy, ref)
    if not isinstance(values, Tensor) or values.shape != policy.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        why = f"it got log-probabilities of shape {tuple(policy.shape)}"
        fix = "wrap it so that it takes and returns [batch, tokens]"
        raise ShapeError("a KL function must return one number per token", got=got, why=why, fix=fix)
    return values


def judge_value(loss: Loss, chains: Sequence[Chain]) -> ValueFinding:
    """What the expected value of a loss per token is, over worlds of one position."""
    means, reverse, forward = (
        torch.stack([measure(chain).detach().double() for chain in chains])
        for measure in (lambda chain: expected(chain, loss), reverse_kl, forward_kl)
    )
    divergences = {"KL(policy||ref)": reverse, "KL(ref||policy)": forward}
    divergences |= {f"minus {name}": -values for name, values in divergences.items()} | {
        "zero": torch.zeros_like(reverse)
    }
    names = [name for name, values in divergences.items() if ((means - values).abs() <= TOLERANCE * reverse).all()]
    value, target = means.mean().item(), reverse.mean().item()
    return ValueFinding(
        estimates=names[0] if names else "neither KL",
        expected=value,
        reverse_kl=target,
        relative_bias=(value - target) / target,
        standard_deviation=torch.stack([variance(chain, loss).double() for chain in chains]).mean().sqrt().item(),
        lowest=min(loss(enumerate_outcomes(chain)).min().item() for chain in chains),
    )


def one_token(function: KLFunction, dtype: torch.dtype, log_ratio: float, use: Use = "loss") -> tuple[float, float]:
    """The value and gradient of one token at this log-ratio."""
    likely, unlikely = -0.5, -0.5 - abs(log_ratio)
    first, second = (likely, unlikely) if log_ratio > 0 else (unlikely, likely)
    policy = torch.tensor([[first]], dtype=dtype, requires_grad=True)
    values = _call(function, policy, torch.tensor([[second]], dtype=dtype))
    if use == "reward":
        return values.item(), values.item()
    if not values.requires_grad:
        return values.item(), 0.0
    (slope,) = torch.autograd.grad(values.sum(), policy, allow_unused=True)
    return values.item(), 0.0 if slope is None else slope.item()


def far_faults(function: KLFunction, use: Use = "loss", *, moves: bool) -> str:
    """What is wrong with a token at +-30 nats, and in which floating-point types; `moves`: it has to pull back."""
    types: dict[str, list[str]] = {}
    for (name, dtype), far in product(DTYPES.items(), (FAR, -FAR)):
        value, slope = one_token(function, dtype, far, use)
        faults = [f"the {what} is {x}" for what, x in (("value", value), ("gradient", slope)) if not math.isfinite(x)]
        if moves and slope * far <= 0:
            faults.append(f"the gradient {'pushes away from the reference' if slope else 'is zero'}")
        if faults:
            types.setdefault(f"at {far:+g} nats {faults[0]}", []).append(name)
    return "; ".join(f"{fault} ({', '.join(names)})" for fault, names in types.items())


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


class PrintedForm(NamedTuple):
    """A formula that is passed around as a KL, and how it is used."""

    document: str  # where it is printed; see docs/sources.md
    prints: str
    function: KLFunction | None  # of log policy and log ref, token by token; None: the sum over the whole vocabulary
    instead: str  # its name in klamp, and how to get the intended KL there
    use: Use = "loss"  # differentiated as a loss, or taken from the reward

    @property
    def value(self) -> Loss:
        """The formula over the oracle's outcomes."""
        return exact if self.function is None else as_loss(self.function)


FORMS: Mapping[str, PrintedForm] = {
    "k1-as-loss": PrintedForm(
        "the from-scratch guide",
        "log policy - log ref, its mean times kl_coef is added to the loss",
        lambda policy, ref: policy - ref,
        "kl_estimator='k1', kl_gradient='own'; with kl_gradient='reverse' the same value has the gradient it lacks",
    ),
    "minus-k1": PrintedForm(
        "the Tinker guide",
        "kl_coef * (log ref - log policy) is added to the loss",
        lambda policy, ref: ref - policy,
        "no such term; kl_estimator='k1' with kl_gradient='reverse' has the right sign, and the value's gradient",
    ),
    "ratio-weighted": PrintedForm(
        "the GRPO tutorial",
        "exp(log policy - log ref) * (log policy - log ref), summed over tokens, is taken from the reward",
        lambda policy, ref: (policy - ref).exp() * (policy - ref),
        "no such term; use kl_estimator='k1' with kl_placement='reward' and kl_horizon='sequence', or "
        "kl_estimator='exact' in the loss, as in the tutorial's hands-on example (klamp explain exact-kl)",
        use="reward",
    ),
    "exact-kl": PrintedForm(
        "the hands-on example of the GRPO tutorial",
        "sum over the vocabulary of policy * (log policy - log ref), at each position, as the KL",
        None,
        "kl_estimator='exact'",
    ),
    "k3-as-loss": PrintedForm(
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
        ("found in", f"{form.document} (docs/sources.md)"),
        ("value", f"{value.expected:+.4f} nats per token where KL(policy||ref) is {value.reverse_kl:+.4f}"),
        ("", f"with tokens of the reference {under_ref:+.4f}"),
        ("pull", f"at one position {pull.in_words()}"),
        ("sequence", f"over whole completions, of up to 3 tokens: {whole.in_words()}"),
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
    if abs(under_ref - value.reverse_kl) < 1e-9:
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"
