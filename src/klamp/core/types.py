"""The words and tensor shapes that klamp's core uses, and the batch that a loss is computed from.

Glossary (one sign, everywhere):

    policy      the model being trained                         log-probabilities carry a gradient
    old         the policy at the start of the rollout's updates (for the PPO ratio)
    sampler     whoever drew the tokens, as it reported itself  (behaviour policy, mu)
    ref         the reference, which the run started from
    teacher     a second anchor, which the policy is to become like
    log_ratio   policy - ref, in nats; positive where the policy is likelier than the reference
    mask        True = a token to train on
    reverse     KL(policy || ref), what "the KL" means in RL fine-tuning
    forward     KL(ref || policy)

Shapes: B sequences, T completion positions, V vocabulary entries. Log-probabilities are natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core.arguments import AT_LEAST_1, FLOATS, MASKS, POSITIVE, REALS, check_data, check_number, check_tensors
from klamp.errors import ConfigError, ShapeError

Estimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]
Value: TypeAlias = Literal[Estimator, "exact"]
Anchor: TypeAlias = Literal["reference", "teacher", "sampler"]
"""Whom a KL holds the policy to: where it started, where it should go, who drew the tokens."""
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What `grpo_loss` takes: B completions of T tokens, with their log-probabilities in nats, already scored.

    Sampler: whoever `sampler_logprobs` belong to; without them the old policy, without that one the policy itself.
    Gradient: flows into `policy_logprobs`, `exact_kl`, `exact_kl_forward` and `teacher_kl`. The rest is data: a
    gradient that other log-probabilities carry is not followed.
    Shapes: [B, T] throughout, on one device; log-probabilities of any floating type; `advantages` also [B], and
    `gate_kl` and `reference_length` one number per completion. Padding is whatever the mask is False for.

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
    ref_logprobs: LogProbs | None = None
    """Under the reference; None only where no KL is asked for."""
    sampler_logprobs: LogProbs | None = None
    """Under whoever sampled, as it reported itself; for off-policy weights."""
    exact_kl: TokenValues | None = None
    """Exact KL(policy || ref) at each prefix, with gradient where it is the loss."""
    exact_kl_forward: TokenValues | None = None
    """Exact KL(ref || policy) at each prefix, with gradient; for kl_estimator='exact' with kl_gradient='forward'."""
    kl_mask: Mask | None = None
    """True = the token carries the KL; None: the same as `mask`, and all of the tokens carry it in every other part of
    the step too (k1 over sequences counts later tokens by k3 where some may be left out)."""
    kl_weight: Float[Tensor, " batch"] | None = None
    """Factor >= 0 on the KL of each sequence; None: 1 for all."""
    gate_kl: Float[Tensor, " batch"] | None = None
    """KL (nats per sequence) that the clip is gated on; None: computed from this batch."""
    reference_length: Float[Tensor, " batch"] | float | None = None
    """Reference length in tokens that turns a per-token threshold into a budget."""
    group_size: int | None = None
    """Completions per prompt, next to each other; for a gate at group level."""
    teacher_logprobs: LogProbs | None = None
    """Under the teacher; None only where no KL to one is asked for."""
    teacher_kl: TokenValues | None = None
    """KL to the teacher at each prefix, over the vocabulary or as `topk_kl`, with gradient where it is the loss."""
    teacher_mask: Mask | None = None
    """True = the teacher scored the token, and it carries the KL to it; None: the same as `mask`."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_shapes(self)

    def anchor_logprobs(self, anchor: Anchor) -> LogProbs | None:
        """Under the anchor; None where the batch has none."""
        return {"reference": self.ref_logprobs, "teacher": self.teacher_logprobs, "sampler": self.sampler_logprobs}[
            anchor
        ]

    def towards(self, anchor: Anchor) -> Batch:
        """The batch as a KL to this anchor sees it: what the anchor says stands where the reference's numbers do."""
        if anchor == "reference":
            return self
        found = self.anchor_logprobs(anchor)
        if found is None:
            raise ConfigError(
                f"a KL to the {anchor} is asked for and the batch has no log-probabilities of it",
                got=f"{anchor}_logprobs=None",
                why="leaving the term out silently would train without it",
                fix=f"set Batch.{anchor}_logprobs, or the coefficient of that KL to 0",
            )
        if anchor == "sampler":
            return replace(self, ref_logprobs=found, exact_kl=None, exact_kl_forward=None)
        return replace(
            self,
            ref_logprobs=found,
            exact_kl=self.teacher_kl,
            exact_kl_forward=None,
            kl_mask=self.teacher_mask,
            kl_weight=None,
            gate_kl=None,
        )


_SCORES = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")
_PER_TOKEN = (*_SCORES, "exact_kl", "exact_kl_forward", "teacher_kl")
_PER_SEQUENCE = ("kl_weight", "gate_kl")


def _given(batch: Batch, *names: str) -> dict[str, Tensor]:
    return {name: x for name in names if (x := getattr(batch, name)) is not None}


def _check_kinds(batch: Batch) -> None:
    policy = batch.policy_logprobs
    check_tensors(FLOATS, policy_logprobs=policy)
    check_tensors(FLOATS, like=policy, **_given(batch, *_PER_TOKEN, *_PER_SEQUENCE))
    check_tensors(MASKS, like=policy, mask=batch.mask, **_given(batch, "kl_mask", "teacher_mask"))
    check_tensors(REALS, like=policy, advantages=batch.advantages)
    recorded = getattr(batch.advantages, "recorded_by_klamp", False)  # klamp.watch: its gradient trains nothing
    check_data(advantages=None if recorded else batch.advantages, **_given(batch, *_PER_SEQUENCE))
    check_number("group_size", batch.group_size, AT_LEAST_1, whole=True, optional=True)
    if isinstance(batch.reference_length, Tensor):
        check_tensors(REALS, reference_length=batch.reference_length)  # moved to the others' device where it is used
    else:
        check_number("reference_length", batch.reference_length, POSITIVE, optional=True)


def _check_shapes(batch: Batch) -> None:
    shape = batch.policy_logprobs.shape
    if len(shape) != 2:
        raise ShapeError(
            "policy_logprobs must have the shape [B, T]",
            got=str(tuple(shape)),
            why="it holds one number per token of each completion",
            fix="policy_logprobs[None] for a single completion",
        )
    lengths = batch.reference_length
    of_each = ("reference_length",) if isinstance(lengths, Tensor) and lengths.ndim else ()
    tokens = {"mask": batch.mask, **_given(batch, *_PER_TOKEN, "kl_mask", "teacher_mask")}
    for name, x in (tokens | _given(batch, *_PER_SEQUENCE, *of_each)).items():
        if x.shape != (shape if name in tokens else shape[:1]):
            wanted = "the shape of policy_logprobs" if name in tokens else "one number per completion"
            raise ShapeError(
                f"{name} does not have {wanted}",
                got=f"{name} {tuple(x.shape)}, policy_logprobs {tuple(shape)}",
                why="all of them describe the same completions",
                fix="score the same tokens, padded to the same length" if name in tokens else f"pass {name} as [B]",
            )
    if batch.advantages.shape not in (shape, shape[:1]):
        raise ShapeError(
            "the advantages fit neither the completions nor the tokens",
            got=f"advantages {tuple(batch.advantages.shape)}, policy_logprobs {tuple(shape)}",
            why="an advantage belongs to a completion [B] or to a token [B, T]",
            fix="pass one advantage per completion, or one per token padded as the log-probabilities are",
        )


class LossOutput(NamedTuple):
    """What `grpo_loss` gives: the loss to call `backward` on, in units of reward, and what was measured on the way.

    All are scalars; the metrics (docs/metrics.md) are detached.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]
