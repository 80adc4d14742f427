"""The words and tensor shapes that klamp's core uses, and the batch that a loss is computed from.

Glossary (one sign, everywhere):

    policy      the model being trained                         log-probabilities carry a gradient
    old         the policy at the start of the rollout's updates (for the PPO ratio)
    sampler     whoever drew the tokens, as it reported itself  (behaviour policy, mu)
    ref         the frozen reference
    log_ratio   policy - ref, in nats; positive where the policy is likelier than the reference
    mask        True = a token to train on
    reverse     KL(policy || ref), what "the KL" means in RL fine-tuning
    forward     KL(ref || policy)

Shapes: B sequences, T completion positions, V vocabulary entries. Log-probabilities are natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What `grpo_loss` takes: B completions of T tokens, with their log-probabilities in nats, already scored.

    Sampler: whoever `sampler_logprobs` belong to; without them the old policy, without that one the policy itself.
    Gradient: flows into `policy_logprobs`, `exact_kl` and `exact_kl_forward`. The rest is data: a gradient that other
    log-probabilities carry is not followed.
    Shapes: [B, T] throughout, on one device; log-probabilities of any floating type; `advantages` also [B], and
    `kl_weight`, `gate_kl`, `reference_length` one number per completion. Padding is whatever the mask is False for.
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
    """True = the token carries the KL; None: the same as `mask`."""
    kl_weight: Float[Tensor, " batch"] | None = None
    """Factor >= 0 on each sequence's KL; 0: its reference log-probabilities are not looked at. None: 1 for all."""
    gate_kl: Float[Tensor, " batch"] | None = None
    """KL (nats per sequence) that the clip is gated on; None: computed from this batch."""
    reference_length: Float[Tensor, " batch"] | float | None = None
    """Reference length in tokens that turns a per-token threshold into a budget."""
    group_size: int | None = None
    """Completions per prompt, next to each other; for a gate at group level."""


class LossOutput(NamedTuple):
    """What `grpo_loss` gives: the loss to call `backward` on, in units of reward, and what was measured on the way.

    Gradient: that of `grpo_loss`, in `loss` only; metrics are detached.
    Shapes: scalars.

    Attributes:
        loss: scalar with gradient.
        metrics: name -> detached scalar tensor; names as in `klamp.diagnostics.metrics.METRICS` (docs/metrics.md).
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]
