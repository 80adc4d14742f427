"""The words and tensor shapes that klamp's core uses, and the batch that a loss is computed from.

Glossary (one sign, everywhere):

    policy      the model being trained                         log-probabilities carry a gradient
    old         the policy at the start of the rollout's updates (for the PPO ratio)
    sampler     whoever drew the tokens, as it reported itself  (behaviour policy, mu)
    ref         the reference, which the run started from
    teacher     a second anchor, which the policy is to become like
    anchor      whom a KL holds the policy to: the reference, a teacher, the sampler, or any other scored model
    log_ratio   policy - anchor, in nats; positive where the policy is likelier than the anchor
    mask        True = a token to train on
    reverse     KL(policy || ref), what "the KL" means in RL fine-tuning
    forward     KL(ref || policy)

Shapes: B sequences, T completion positions, V vocabulary entries. Log-probabilities are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core.arguments import (
    AT_LEAST_1,
    FLOATS,
    MASKS,
    POSITIVE,
    REALS,
    Kind,
    check_data,
    check_instance,
    check_number,
    check_roles,
    check_tensors,
    check_values_exist,
    describe,
)
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError

Estimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]
Value: TypeAlias = Literal[Estimator, "exact"]
Direction: TypeAlias = Literal["reverse", "forward", "js"]
Gradient: TypeAlias = Literal["reverse", "forward", "own", "none"]
Horizon: TypeAlias = Literal["token", "sequence"]
ClipMethod: TypeAlias = Literal["none", "hard", "soft"]
Reduction: TypeAlias = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
LossPart: TypeAlias = Literal["policy", "kl"]

TokenValues: TypeAlias = Float[Tensor, "batch tokens"]
LogProbs: TypeAlias = Float[Tensor, "batch tokens"]
Mask: TypeAlias = Bool[Tensor, "batch tokens"]
Advantages: TypeAlias = Float[Tensor, "..."]


class Scored(NamedTuple):
    """What one anchor (a reference, a teacher, the sampler) says about the completions of a batch."""

    logprobs: LogProbs
    """Log-probabilities of the sampled tokens under the anchor, data without gradient. [B, T]"""
    kl: TokenValues | None = None
    """KL to the anchor at each prefix, `exact_kl` or `topk_kl`, with gradient if it is in the loss; or a sampled KL's
    baseline, which must not depend on the sampled token (a sampled tail does). [B, T]"""
    forward_kl: TokenValues | None = None
    """Exact KL(anchor || policy) at each prefix, with gradient; for value `exact` with gradient `forward`. [B, T]"""
    mask: Mask | None = None
    """True = the token carries the KL to the anchor; None: every trained token does, in this and all other parts of the
    step (k1 over sequences counts later tokens by k3 if some may be left out). [B, T]"""
    gate: Float[Tensor, " batch"] | None = None
    """KL in nats per sequence that decides the clip; None: computed from this batch. [B]"""
    weight: Float[Tensor, " batch"] | None = None
    """Factor >= 0 on the KL of each sequence; None: 1. [B]"""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What `grpo_loss` takes: B completions of T tokens, scored by the policy and by each anchor, in nats.

    Sampler: the anchor `sampler`; without it the old policy, without that one the policy itself.
    Gradient: flows into `policy_logprobs`, and into `kl` and `forward_kl` of each anchor. The rest is data.
    Shapes: [B, T] throughout, on one device; log-probabilities of any floating type; `advantages` also [B].
    Padding: the mask is False.

    `ref_logprobs` and `sampler_logprobs` are short for `anchors["reference"]` and `anchors["sampler"]`; they are
    arguments only, and are read as `logprobs_of(...)`.

    Raises:
        TensorError: no tensor, another data type, another device, or a gradient where there must be none.
        ShapeError: shapes that do not fit together.
        ConfigError: a group size or a reference length that is no positive number.
    """

    policy_logprobs: LogProbs
    """Log-probabilities of the sampled tokens under the policy, with gradient. [B, T]"""
    mask: Mask
    """True = a token to train on. [B, T]"""
    advantages: Advantages
    """One per completion, or one per token. [B] or [B, T]"""
    old_logprobs: LogProbs | None = None
    """Under the policy at the start of the rollout's updates; None on-policy: the policy itself, detached."""
    anchors: Mapping[str, Scored] = field(default_factory=dict[str, Scored])
    """Name -> what that anchor says. `reference`, `teacher` and `sampler` are names; any other may be added."""
    reference_length: Float[Tensor, " batch"] | float | None = None
    """Reference length in tokens that turns a per-token threshold into a budget."""
    group_size: int | None = None
    """Completions per prompt, next to each other; for a gate at group level."""
    ref_logprobs: InitVar[LogProbs | None] = None
    sampler_logprobs: InitVar[LogProbs | None] = None

    def __post_init__(self, ref_logprobs: LogProbs | None, sampler_logprobs: LogProbs | None) -> None:
        check_instance("anchors", self.anchors, Mapping, fix="pass a dict of name -> Scored(logprobs)")
        anchors = dict(self.anchors)
        for name, scored in anchors.items():
            check_instance(f"anchors[{name!r}]", scored, Scored, fix="pass Scored(logprobs)")
        for name, logprobs in (("reference", ref_logprobs), ("sampler", sampler_logprobs)):
            if logprobs is not None:
                anchors[name] = anchors[name]._replace(logprobs=logprobs) if name in anchors else Scored(logprobs)
        object.__setattr__(self, "anchors", anchors)
        _check_tensors(self)

    def logprobs_of(self, anchor: str) -> LogProbs | None:
        """Log-probabilities under an anchor; None if the batch has none. [B, T]"""
        return self.anchors[anchor].logprobs if anchor in self.anchors else None

    def with_anchor(self, anchor: str, **changes: Any) -> Batch:
        """The batch with other fields of one anchor's `Scored`."""
        return replace(self, anchors={**self.anchors, anchor: self.anchors[anchor]._replace(**changes)})


HELD = ("reference", "sampler")
"""Anchors that a run's own KL may be to, logged as `kl/...`; the KL to any other is logged under the anchor's name."""


def held_anchors(
    reference: LogProbs | None, sampler: LogProbs | None, *, mask: Mask | None = None, gate: Tensor | None = None
) -> dict[str, Scored]:
    """What the anchors of `HELD` say; exclusions and the clip's KL are the same for both."""
    logprobs = zip(HELD, (reference, sampler), strict=True)
    return {name: Scored(x, mask=mask, gate=gate) for name, x in logprobs if x is not None}


def argument_of(anchor: str) -> str:
    """How errors call the log-probabilities of an anchor."""
    return "ref_logprobs" if anchor == "reference" else f"{anchor}_logprobs"


def _tensors_of(batch: Batch) -> Iterator[tuple[str, Tensor, Kind, bool]]:
    """(name, tensor, its kind, whether it holds one number per token) for a batch, besides policy and advantages."""
    yield "mask", batch.mask, MASKS, True
    if batch.old_logprobs is not None:
        yield "old_logprobs", batch.old_logprobs, FLOATS, True
    for anchor, scored in batch.anchors.items():
        yield argument_of(anchor), scored.logprobs, FLOATS, True
        for name, x in scored._asdict().items():
            if name != "logprobs" and x is not None:
                kind = MASKS if name == "mask" else FLOATS
                yield f"anchors[{anchor!r}].{name}", x, kind, name not in ("gate", "weight")


def _check_tensors(batch: Batch) -> None:
    policy, advantages, length = batch.policy_logprobs, batch.advantages, batch.reference_length
    check_tensors(FLOATS, policy_logprobs=policy)
    if policy.ndim != 2:
        logits = policy.ndim == 3
        raise ShapeError(
            "policy_logprobs must have the shape [B, T]",
            got=f"{tuple(policy.shape)}, which looks like logits" if logits else str(tuple(policy.shape)),
            why="it holds one number per token of each completion",
            fix="logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]"
            if logits
            else "policy_logprobs[None] for a single completion",
        )
    for name, x, kind, per_token in _tensors_of(batch):
        check_tensors(kind, like=policy, **{name: x})
        check_data(**({} if per_token else {name: x}))
        _check_shape(name, x, policy, per_token=per_token)
    check_tensors(REALS, like=policy, advantages=advantages)
    _check_shape("advantages", advantages, policy, per_token=advantages.ndim == 2)
    recorded = getattr(advantages, "recorded_by_klamp", False)  # klamp.watch: its gradient trains nothing
    check_data(**({} if recorded else {"advantages": advantages}))
    check_number("group_size", batch.group_size, AT_LEAST_1, whole=True, optional=True)
    if not isinstance(length, Tensor):
        check_number("reference_length", length, POSITIVE, optional=True)
        return
    check_tensors(REALS, reference_length=length)  # moved to the others' device where it is used
    if length.ndim:
        _check_shape("reference_length", length, policy, per_token=False)


def _check_shape(name: str, x: Tensor, policy: Tensor, *, per_token: bool) -> None:
    if x.shape != (policy.shape if per_token else policy.shape[:1]):
        raise ShapeError(
            f"{name} does not have {'the shape of policy_logprobs' if per_token else 'one number per completion'}",
            got=f"{name} {tuple(x.shape)}, policy_logprobs {tuple(policy.shape)}",
            why="all of them describe the same completions",
            fix="score the same tokens, padded to the same length" if per_token else f"pass {name} as [B]",
        )


# Log-probabilities rounded in bfloat16 can end just above zero.
POSITIVE_TOLERANCE = 1e-2


def _describe(bad: Tensor, x: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"{int(bad.sum())} of {bad.numel()} tokens, the first at {index} with value {float(x[index])}"


FORBIDDEN = -9999.0
"""A log-probability at or below it means -inf, which vLLM's servers write as -9999: JSON has no infinities."""
SCORING = "check the scoring pass: dtype overflow, logits masked with -inf at the sampled token, or a mask over padding"
NO_WEIGHTS = "look for NaN among the weights of the model that gave them, and load it whole, in its own data type"
BOUND_IT = f"{SCORING}; if the model rules out what was sampled, teacher_max_log_ratio bounds its pull, and counts it"


def check_logprobs(name: str, logprobs: Tensor, mask: Mask, *, fix: str = SCORING) -> None:
    """Refuse values at unmasked positions that no log-probability of a sampled token can have."""
    x = logprobs.detach()
    lost = mask & ~(x.isfinite() & (x > FORBIDDEN))
    if bool(lost.any()):
        raise NonFiniteError(
            f"{name} holds values that no log-probability of a sampled token can have",
            got=_describe(lost, x),
            why="NaN and infinities would spread into the loss and from there into the weights; -9999 is how a vLLM "
            "server writes -inf",
            fix=NO_WEIGHTS if bool((lost & x.isnan()).any()) else fix,
        )
    refuse_positive(mask, **{name: x})


def refuse_positive(mask: Mask | None = None, **logprobs: Tensor) -> None:
    """Refuse log-probabilities above 0 at unmasked positions: they are something else. NaN and infinities pass."""
    for name, logprob in logprobs.items():
        if logprob.is_meta or torch.compiler.is_compiling():  # there are no values to look at
            continue
        x = logprob.detach()
        bad = (x > POSITIVE_TOLERANCE) & x.isfinite()
        bad = bad if mask is None else bad & mask
        if bool(bad.any()):
            raise DataError(
                f"{name} holds log-probabilities above 0",
                got=_describe(bad, x),
                why="the logarithm of a probability is never above 0, so these are something else",
                fix="pass log-probabilities (log_softmax, taken at the sampled token), not probabilities, logits or "
                "negative log-likelihoods",
            )


def check_batch(batch: Batch, *, part: bool = False, bounded: Collection[str] = ()) -> None:
    """Check the values of a batch before any loss is computed; its shapes it checked itself.

    Args:
        part: whether it is a micro-batch, which may have no tokens to train on.
        bounded: anchors whose log-ratio is bounded, so that a token may have no probability under them.

    Raises:
        TensorError: tensors without values (on the meta device).
        ShapeError, EmptyMaskError: a batch without tokens, or without one to train on.
        ConfigError: an anchor's log-probabilities carry the gradient and the policy's none.
        NonFiniteError, DataError: NaN, infinite or positive log-probabilities; advantages or weights out of range.
    """
    check_values_exist("policy_logprobs", batch.policy_logprobs)
    for scored in batch.anchors.values():
        check_roles(batch.policy_logprobs, scored.logprobs)
    if batch.mask.numel() == 0:
        raise ShapeError(
            "the batch has no tokens",
            got=f"policy_logprobs {tuple(batch.mask.shape)}",
            why="there is nothing to average over",
            fix="leave empty batches out",
        )
    if not part and not bool(batch.mask.any()):
        raise EmptyMaskError(
            "the mask is False everywhere",
            got=f"shape {tuple(batch.mask.shape)}",
            why="there is no token to average over",
            fix="check that completions are not empty and that the mask marks the completion, not the prompt",
        )
    check_logprobs("policy_logprobs", batch.policy_logprobs, batch.mask)
    if batch.old_logprobs is not None:
        check_logprobs("old_logprobs", batch.old_logprobs, batch.mask)
    for anchor, scored in batch.anchors.items():
        _check_anchor(anchor, scored, batch.mask, bounded=anchor in bounded)
    _check_advantages(batch.advantages, batch.mask)


def _check_anchor(anchor: str, scored: Scored, mask: Mask, *, bounded: bool) -> None:
    counted, fix = mask, SCORING
    if anchor not in HELD:  # the run's own anchors score every trained token, also one that carries no KL
        fix = BOUND_IT
        counted = mask if scored.mask is None else mask & scored.mask
        counted = counted & ~(scored.logprobs <= FORBIDDEN) if bounded else counted
    check_logprobs(argument_of(anchor), scored.logprobs, counted, fix=fix)
    if scored.weight is not None and not bool(((scored.weight >= 0) & scored.weight.isfinite()).all()):
        raise DataError(
            "the weights of an anchor must be one finite number >= 0 per sequence",
            got=f"anchors[{anchor!r}].weight={describe(scored.weight)}",
            why="it is the factor on each sequence's KL; a negative one would reward leaving the anchor",
            fix="leave weight out",
        )


def _check_advantages(advantages: Tensor, mask: Mask) -> None:
    finite = advantages.isfinite() if advantages.ndim == 1 else advantages.isfinite() | ~mask
    if not bool(finite.all()):
        raise NonFiniteError(
            "an advantage is NaN or infinite",
            got=f"{int((~finite).sum())} of {finite.numel()}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )


class LossOutput(NamedTuple):
    """What `grpo_loss` returns: the loss, in units of reward, and detached metrics (docs/metrics.md); all scalars."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]
