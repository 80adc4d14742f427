"""Examines the KL of an installed trainer: which value, which gradient, how far from the reference it still works.

A `Term` is one KL term of one host, behind a function that returns the KL part of the host's own loss for one
completion, its coefficient taken out. `audit_term` sends it through `judge` (tokens from the policy, one position), and
beyond what that can show: near the reference, where nothing is clamped; through completions of several tokens, from
the policy and from an older one; and through every floating-point type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from klamp.audit.distillation import Distillation, DistillationFinding, examine_distillation, told
from klamp.errors import ShapeError
from klamp.verify.judge import (
    DTYPES,
    FAR,
    SCAN_STEP,
    TOLERANCE,
    Judgement,
    KLFunction,
    Use,
    as_loss,
    judge,
    judge_value,
    one_token,
)
from klamp.verify.oracle import Followed, Loss, expected, expected_pull, in_reward, reverse_kl
from klamp.verify.worlds import Chain, Outcomes, Sampler, random_chain, random_positions

CompletionLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(policy_logprobs, ref_logprobs, old_logprobs), each [1, T] -> the KL of the completion: a scalar, coefficient 1."""
HostLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(policy_logprobs, ref_logprobs, old_logprobs, mask), each [B, T] -> the KL part of the host's own loss of a batch,
coefficient 1: a scalar. `old` are those of the policy that sampled; the mask is True on the tokens of completions."""

NEAR_SPREAD = 0.2
"""Standard deviation of the logits near the reference: no log-ratio exceeds a nat there."""
LOCAL = {"zero": "zero", "reverse": "local", "forward": "local_forward"}
"""Gradient at one position -> the same over completions, each token answering for itself."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One KL term of a host."""

    name: str
    """The name of the function or class, and the option that makes it compute this term."""
    completion: CompletionLoss
    """The host's KL of one completion, summed over its tokens."""
    function: KLFunction | None = None
    """The same token by token, where the host has such a function; None: it is found through `completion`."""
    use: Use = "loss"
    """Whether the host differentiates the term as a loss, or takes it from the reward."""

    @classmethod
    def of_function(cls, name: str, function: KLFunction, *, use: Use = "loss") -> Term:
        """The term of a function of [B, T] log-probabilities under policy and reference."""
        return cls(name=name, completion=lambda p, ref, old: function(p, ref).sum(), function=function, use=use)

    @classmethod
    def of_mean(cls, name: str, loss: HostLoss) -> Term:
        """The term of a loss that is, for a batch of one completion, the mean over its tokens."""

        def completion(policy: Tensor, ref: Tensor, old: Tensor) -> Tensor:
            return loss(policy, ref, old, torch.ones(policy.shape, dtype=torch.bool)) * policy.shape[-1]

        return cls(name=name, completion=completion)


def marked(option: str, value: object, default: object) -> str:
    """An option with its value, marked where that is the default: `loss_type=dapo (default)`."""
    return f"{option}={value}" + (" (default)" if value == default else "")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The KL terms and distillation losses of a trainer, and notes for the reader."""

    title: str
    """The name of the package and its version."""
    terms: tuple[Term, ...] = ()
    """Its KL terms, the default first."""
    distillations: tuple[Distillation, ...] = ()
    """Its distillation losses, the default first."""
    notes: tuple[str, ...] = ()
    """Facts read from the installed package, a sentence each."""
    cautions: tuple[str, ...] = ()
    """Why the result may not hold, such as an untried version."""


@dataclass(frozen=True, kw_only=True)
class TermFinding:
    """What was found out about one term."""

    term: Term
    """The term that was examined."""
    judgement: Judgement | None = None
    """Value, gradient, clamps and probes at one position; None where the host refused to compute it."""
    whole_bias: float = 0.0
    """Relative bias of the value over completions of several tokens, against KL(policy||ref) of these."""
    turns: tuple[float, ...] = ()
    """The log-ratios, in nats, from which on a token is pushed away from the reference, though it is pulled before."""
    near_bias: float = 0.0
    """Relative bias of the value near the reference."""
    near: Followed | None = None
    """Whose gradient it follows near the reference, where no clamp is reached."""
    on_policy: Followed | None = None
    """Whose gradient it follows over completions of several tokens that the policy sampled."""
    off_policy: Followed | None = None
    """The same, with completions that an older policy sampled and the host was told so."""
    reach: tuple[Reach, ...] = ()
    """How far from the reference the gradient is right, for each of `DTYPES`."""
    error: str = ""
    """The exception that the host raised; "" where it raised none."""

    @property
    def token_by_token(self) -> bool:
        """Whether the gradient over whole completions is that of single tokens, with nothing added.

        False where tokens get in each other's way, as under a ratio of the whole completion.
        """
        if self.judgement is None or self.on_policy is None:
            return True
        single = self.judgement.gradient.follows.name
        return single not in LOCAL or self.on_policy.name in (single, LOCAL[single])


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The findings about all KL terms of a trainer."""

    subject: Subject
    """What was audited."""
    findings: tuple[TermFinding, ...]
    """The findings, one per term."""
    distillations: tuple[DistillationFinding, ...] = ()
    """Those of the distillation losses."""


def audit(subject: Subject) -> Audit:
    """Examines every KL term of a trainer; an exception that the trainer raises becomes the finding.

    Raises:
        ShapeError: a function does not return one number per token.
    """
    return Audit(
        subject=subject,
        findings=tuple(map(audit_term, subject.terms)),
        distillations=tuple(map(examine_distillation, subject.distillations)),
    )


def audit_term(term: Term) -> TermFinding:
    """Examines one KL term of a trainer."""
    function = term.function or per_token(term)
    try:
        near_bias, near = near_reference(function, term.use)
        return TermFinding(
            term=term,
            judgement=judge(function, use=term.use),
            whole_bias=whole_bias(term),
            turns=tuple(turn for side in (-1, 1) if (turn := _turn(function, side, term.use)) is not None),
            near_bias=near_bias,
            near=near,
            on_policy=over_completions(term, sampler="policy"),
            off_policy=over_completions(term, sampler="other"),
            reach=tuple(measure_reach(function, dtype, use=term.use) for dtype in DTYPES),
        )
    except ShapeError:
        raise
    except Exception as error:  # whatever the host raises is the finding
        return TermFinding(term=term, error=told(error))


def kl_of_one_token(term: Term) -> float:
    """The value of a term for one token whose log-ratio to the reference is half a nat."""
    policy = torch.tensor([[-1.0]], dtype=torch.float64)
    return term.completion(policy.clone().requires_grad_(), policy - 0.5, policy).item()


def per_token(term: Term) -> KLFunction:
    """A term as a function of [B, T] tokens, each token being scored as a completion of length 1."""

    def function(policy: Tensor, ref: Tensor) -> Tensor:
        pairs = zip(policy.reshape(-1, 1, 1), ref.reshape(-1, 1, 1), strict=True)
        return torch.stack([term.completion(p, r, p.detach()) for p, r in pairs]).reshape(policy.shape)

    return function


def near_reference(function: KLFunction, use: Use = "loss") -> tuple[float, Followed]:
    """The relative bias of the value, and the gradient that is followed, where policy and reference are close."""
    chains = random_positions(3, spread=NEAR_SPREAD)
    value, loss = judge_value(as_loss(function), chains), as_loss(function, use)
    return value.relative_bias, expected_pull(chains, loss, tolerance=TOLERANCE).follows


def over_completions(term: Term, *, sampler: Sampler) -> Followed:
    """The gradient that a term follows over completions of one and two tokens, in several enumerated worlds."""
    loss = _of_completions(term)
    used = in_reward(loss) if term.use == "reward" else loss
    return expected_pull(_completions(sampler), used, tolerance=TOLERANCE).follows


def whole_bias(term: Term) -> float:
    """The relative bias of a term's value over completions of one and two tokens that the policy samples."""
    chains = _completions("policy")
    found = sum(expected(chain, _of_completions(term)).item() for chain in chains)
    return found / sum(reverse_kl(chain).item() for chain in chains) - 1


def _completions(sampler: Sampler) -> list[Chain]:
    return [random_chain(seed, vocab=3, length=2, sampler=sampler) for seed in range(3)]


def _of_completions(term: Term) -> Loss:
    def loss(y: Outcomes) -> Tensor:
        rows = zip(y.policy_logprobs, y.ref_logprobs, y.sampler_logprobs, y.mask, strict=True)
        return torch.stack([term.completion(*(x[mask][None] for x in row)) for *row, mask in rows])

    return loss


def _turn(function: KLFunction, side: int, use: Use) -> float | None:
    """The log-ratio from which on a token's gradient pushes away; None: it never does, or does so from the start."""

    def pulls(size: float) -> bool:
        return one_token(function, torch.float64, side * size, use)[1] * side > 0

    sizes = [SCAN_STEP * (i + 1) for i in range(round(FAR / SCAN_STEP))]
    away = next((size for size in sizes if one_token(function, torch.float64, side * size, use)[1] * side < 0), None)
    return side * (away - SCAN_STEP) if away is not None and pulls(SCAN_STEP) else None


WRONG = 0.1
"""A gradient is wrong when it is off by more than this share of the float64 one."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The range of log-ratios, in whole nats, in which value and gradient are right in one floating-point type."""

    dtype: torch.dtype
    """The floating-point type of the log-probabilities."""
    low: int
    """The lowest log-ratio of the range, 0 or less."""
    high: int
    """The highest log-ratio of the range, 0 or more."""
    failure: str = ""
    """What happens first beyond them: inf, nan, zero, off, or raises; empty where nothing does."""

    @property
    def everywhere(self) -> bool:
        """Whether no log-ratio that was tried went wrong."""
        return -self.low == self.high == FAR


def measure_reach(function: KLFunction, dtype: torch.dtype, *, use: Use = "loss") -> Reach:
    """Raises the log-ratio nat by nat, up to `FAR`, until the gradient differs from that in float64.

    Args:
        function: (policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T].
        dtype: type of both arguments.
        use: whether the function is differentiated, or its value is the coefficient.
    """
    low, below = _walk(function, dtype, -1, use)
    high, above = _walk(function, dtype, 1, use)
    return Reach(dtype=dtype, low=-low, high=high, failure=below or above)


def _walk(function: KLFunction, dtype: torch.dtype, side: int, use: Use) -> tuple[int, str]:
    for size in range(1, int(FAR) + 1):
        failure = _compare(function, dtype, side * size, use)
        if failure:
            return size - 1, failure
    return int(FAR), ""


def _compare(function: KLFunction, dtype: torch.dtype, log_ratio: int, use: Use) -> str:
    _, right = one_token(function, torch.float64, log_ratio, use)
    try:
        value, got = one_token(function, dtype, log_ratio, use)
    except Exception:  # a foreign function may raise anything; the judge quotes it
        return "raises"
    for number in (value, got):
        if not math.isfinite(number):
            return "nan" if math.isnan(number) else "inf"
    if right == 0 or abs(got - right) <= WRONG * abs(right):
        return ""
    return "zero" if got == 0 else "off"
