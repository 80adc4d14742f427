"""The policy losses, per token, and the trust region to the sampler that weighs them.

Each loss is to be minimised: its gradient raises the probability of good tokens. All take [B, T] log-probabilities and
advantages [B] or [B, T], and return [B, T]. r = policy / old = exp(log policy - log old), A = advantage, sg =
stop-gradient.

The trust region weighs the sampler's tokens by w = old policy / sampler, of a token or of its whole completion. With w
the surrogate's gradient is as if the old policy had drawn the tokens; bounding w trades that for less noise:

    truncate    min(max(w, low), high): biased towards the sampler, and bounded
    mask        w where low <= w <= high, else 0: what is far is dropped

The other masks compare the current policy with the sampler, and set the advantage of what they drop to 0: `threshold`
(DeepSeek-V3.2), `rollout_rs` (TRM, geometric mean), `dppo_mask` (DPPO). Each changes which objective is followed.

A mask is decided by the advantage of the reward. A KL in the advantage stays outside the mask, with the weight w of its
own token: masked with the rest, its gradient would be off by a quarter and more, and where the policy moved most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, FROM_0_TO_1, POSITIVE, check_fields, limited
from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import log_ratio, masked, masked_log_ratio, masked_mean, masked_sum, share_of, upcast
from klamp.core.term import scored_by
from klamp.core.types import Advantages, Batch, LogProbs, Mask, Scored, TokenValues
from klamp.errors import ConfigError


def per_token(advantages: Advantages, like: TokenValues) -> TokenValues:
    """The advantages as [B, T]: an advantage of a whole sequence is repeated for each of its tokens."""
    advantages = upcast(advantages)
    return (advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages).expand_as(like)


def importance_ratio(policy_logprobs: LogProbs, old_logprobs: LogProbs) -> TokenValues:
    """The ratio r of each token, with the old policy detached."""
    return log_ratio(policy_logprobs, old_logprobs.detach()).exp()


_BOUNDS = "the ratio is clipped to [1 - clip_low, 1 + clip_high]", "use values like 0.2 (and 0.28 above, as DAPO does)"
CLIP_LOW, CLIP_HIGH = FROM_0_TO_1.but(*_BOUNDS), AT_LEAST_0.but(*_BOUNDS)
"""Which ratio bounds below and above 1 there are."""


def ppo_clip(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenValues:
    """The clipped surrogate of PPO and GRPO, per token, to be minimised; the old policy sampled.

    Equation: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    Gradient: -r A grad log policy inside the bounds, 0 where the ratio has already moved past them in the direction
    of the advantage.

    Source: PPO arXiv:1707.06347; separate bounds DAPO arXiv:2503.14476
    """
    ratio = importance_ratio(policy_logprobs, old_logprobs)
    a = per_token(advantages, ratio)
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)


def cispo(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> TokenValues:
    """The clipped importance-weight loss of CISPO, per token, to be minimised; the old policy sampled.

    Equation: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy.
    Gradient: -clip(r) A grad log policy: every token keeps a gradient, the weight is bounded. The paper has no lower
    bound, which is clip_low = 1; LossConfig's epsilon of 0.2 cuts weights below 0.8.

    Source: MiniMax-M1 arXiv:2506.13585
    """
    ratio = importance_ratio(policy_logprobs, old_logprobs).detach()
    a = per_token(advantages, ratio)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * a * upcast(policy_logprobs)


def score_function(policy_logprobs: LogProbs, old_logprobs: LogProbs, advantages: Advantages) -> TokenValues:
    """The plain score-function loss (REINFORCE), per token, to be minimised; biased off-policy.

    Equation: -A log policy; the old log-probabilities are not used.
    """
    return -per_token(advantages, policy_logprobs) * upcast(policy_logprobs)


def ratio_clipped(
    policy_logprobs: LogProbs, old_logprobs: LogProbs, advantages: Advantages, *, clip_low: float, clip_high: float
) -> Tensor:
    """Which tokens get no gradient from the clipped surrogate: the ratio is past its bound. [B, T]"""
    ratio = importance_ratio(policy_logprobs.detach(), old_logprobs)
    a = per_token(advantages, ratio)
    return ((ratio < 1 - clip_low) & (a < 0)) | ((ratio > 1 + clip_high) & (a > 0))


TrustMode: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Rejection: TypeAlias = Literal["seq_mean_k1", "seq_max_k3", "seq_max_exact"]
DPPOMask: TypeAlias = Literal["dppo_tv", "dppo_kl"]

TRUST_LOW = AT_LEAST_0.but("it bounds a ratio of probabilities from below", "leave it out for no lower bound")
TRUST_HIGH = POSITIVE.but("it bounds a ratio of probabilities from above", "3.0 is TRL's")
TRUST_THRESHOLD = POSITIVE.but("it is a mean log-ratio in nats per token", "0.5 is a usual value")
RS_THRESHOLD = POSITIVE.but("it bounds a KL in nats, or a ratio", "use 0.05 for seq_max_..., 1.1 for seq_mean_k1")
DPPO_BOUND = AT_LEAST_0.but("it bounds how far a probability moved", "0.2 is prime-rl's for dppo_tv")


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """What bounds the weight old policy / sampler of the policy loss, and which tokens and completions are dropped.

    Raises:
        ConfigError: bounds without a ratio between them; a rejection without a threshold.

    Source: truncated importance sampling arXiv:1802.01561 (V-trace); masks arXiv:2512.02556 (DeepSeek-V3.2), 2512.23075
    (TRM), 2602.04879 (DPPO); names of verl 0.9.1 and prime-rl
    """

    mode: TrustMode | None = None
    """By token or by sequence, truncated or masked; None: no weight."""
    low: float | None = limited(None, TRUST_LOW)
    """Lower bound of the ratio old policy / sampler; None: none."""
    high: float | None = limited(3.0, TRUST_HIGH)
    """Upper bound of the ratio old policy / sampler; None: none. How often it binds is logged."""
    threshold: float | None = limited(None, TRUST_THRESHOLD)
    """Drop completions of negative advantage whose mean log(sampler/policy) exceeds this, in nats per token."""
    rollout_rs: Rejection | None = None
    """Drop completions by their distance from the sampler: seq_mean_k1 (geometric mean of policy / sampler), seq_max_k3
    (largest k3 of a token), seq_max_exact (TRM: largest exact KL(sampler||policy), from the sampler's whole rows)."""
    rollout_rs_threshold: float | None = limited(None, RS_THRESHOLD)
    """Largest distance that is kept: nats of a token; for seq_mean_k1 a ratio above 1, and its reciprocal below 1."""
    dppo_mask: DPPOMask | None = None
    """Drop tokens that the policy moved past a bound in the direction of their advantage; distance from the sampler:
    dppo_tv (change of the token's probability) or dppo_kl (KL of the token against all others, in nats)."""
    dppo_mask_low: float = limited(0.2, DPPO_BOUND)
    """Distance past which a token that became less likely is dropped if its advantage is negative."""
    dppo_mask_high: float = limited(0.2, DPPO_BOUND)
    """Distance past which a token that became likelier is dropped if its advantage is positive."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low is not None and self.high is not None and self.low >= self.high:
            got, why = f"low={self.low:g}, high={self.high:g}", "no ratio is between them"
            fix = "a lower bound below 1, an upper one above 1"
            raise ConfigError("the bounds of the ratio to the sampler cross", got=got, why=why, fix=fix)
        if self.rollout_rs is not None and (self.rollout_rs_threshold or 0) <= (self.rollout_rs == "seq_mean_k1"):
            what, got = f"{self.rollout_rs} has no threshold that it can keep to", f"{self.rollout_rs_threshold}"
            why = "seq_mean_k1 keeps ratios from 1 / threshold to threshold, the others KLs up to threshold"
            fix = "set rollout_rs_threshold: above 1 for seq_mean_k1 (1.1), in nats for the others (0.05)"
            raise ConfigError(what, got=got, why=why, fix=fix)

    @property
    def is_set(self) -> bool:
        """Whether it does anything."""
        return any(x is not None for x in (self.mode, self.threshold, self.rollout_rs, self.dppo_mask))

    def __str__(self) -> str:
        choices = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ", ".join(f"{name} {value}" for name, value, default in choices if value != default)


class Trusted(NamedTuple):
    """What a trust region leaves of a batch."""

    weights: TokenValues
    """Factor on each token's surrogate, detached. [B, T]"""
    kl_weights: TokenValues
    """The same for a KL in the advantage, which a mask leaves where it is, with the weight of its own token. [B, T]"""
    metrics: dict[str, Tensor]
    """Shares of tokens, of completions, and of the advantage's size, that were cut; with `rollout_rs` or `dppo_mask`
    `effective_sample_size` too, with `seq_max_exact` `trm_bound`."""

    @classmethod
    def of(cls, batch: Batch, region: TrustRegion) -> Trusted:
        """The weights of a batch, which has its sampler's log-probabilities."""
        sampler = scored_by(batch, "sampler", user="a trust region", otherwise="leave it out")
        policy, mask = batch.policy_logprobs.detach(), batch.mask
        old = policy if batch.old_logprobs is None else batch.old_logprobs.detach()
        ratio = masked_log_ratio(old, sampler.logprobs, mask)
        weights, outside = torch.ones_like(ratio), torch.zeros_like(mask)
        masks = region.mode is not None and region.mode.endswith("mask")
        if region.mode is not None:
            log_w = ratio.sum(-1, keepdim=True).expand_as(ratio) if region.mode.startswith("sequence") else ratio
            low = -math.inf if not region.low else math.log(region.low)
            high = math.inf if region.high is None else math.log(region.high)
            outside = (log_w < low) | (log_w > high)
            weights = log_w.clamp(low, high).exp()
        kl_weights = ratio.exp() if masks else weights
        left = _dropped(batch, region, sampler) | (outside & masks)
        outside, weights = outside | left, torch.where(left, 0.0, weights)
        size = per_token(batch.advantages, weights).abs()
        total = masked_sum(size, mask)
        dropped = mask.any(-1) & ~((weights > 0) & mask).any(-1)
        metrics = {
            "sampler/tokens_cut": share_of(outside, mask),
            "sampler/sequences_cut": dropped.float().mean(),
            "sampler/advantage_cut": masked_sum(size, outside & mask) / total.clamp(min=torch.finfo(total.dtype).tiny),
        }
        if region.rollout_rs is not None or region.dppo_mask is not None:
            metrics |= effective_sample_size(policy, sampler.logprobs, mask)
        if region.rollout_rs == "seq_max_exact" and sampler.forward_kl is not None:
            metrics["sampler/trm_bound"] = trm_bound(sampler.forward_kl, mask)
        return cls(weights, kl_weights, metrics)


def _dropped(batch: Batch, region: TrustRegion, sampler: Scored) -> Mask:
    """What the masks drop that compare the current policy with the sampler. [B, T]"""
    mask, advantages = batch.mask, batch.advantages
    policy, drawn = masked(batch.policy_logprobs.detach(), mask), masked(sampler.logprobs.detach(), mask)
    delta, dropped = policy - drawn, torch.zeros_like(mask)
    if region.threshold is not None:
        of_sequence = advantages if advantages.ndim == 1 else masked_mean(advantages, mask, -1)
        dropped |= ((masked_mean(-delta, mask, -1) > region.threshold) & (of_sequence < 0))[:, None]
    if region.rollout_rs_threshold is not None and region.rollout_rs == "seq_mean_k1":
        dropped |= (masked_mean(delta, mask, -1).abs() > math.log(region.rollout_rs_threshold))[:, None]
    elif region.rollout_rs_threshold is not None and region.rollout_rs is not None:
        kl = ESTIMATORS["k3"].value(-delta) if region.rollout_rs == "seq_max_k3" else sampler.forward_kl
        if kl is None:
            why, got = "it is summed over the vocabulary", "the sampler's log-probabilities of the sampled tokens alone"
            fix = "set anchors={'sampler': Scored(logprobs, forward_kl=exact_kl(policy_logits, sampler_logits, "
            fix += "direction='forward'))}, or use seq_max_k3, which drops other completions"
            raise ConfigError("seq_max_exact needs KL(sampler||policy) at each prefix", got=got, why=why, fix=fix)
        dropped |= masked(kl.detach(), mask).amax(-1, keepdim=True) > region.rollout_rs_threshold
    if region.dppo_mask is not None:
        p, q, a = policy.exp(), drawn.exp(), per_token(advantages, policy)
        rest, other = (-torch.expm1(x.clamp(max=0)) for x in (drawn, policy))
        binary = q * -delta + torch.xlogy(rest, rest) - torch.xlogy(rest, other)  # the token against all others
        far = (p - q).abs() if region.dppo_mask == "dppo_tv" else binary
        up, down = (p > q) & (a > 0) & (far > region.dppo_mask_high), (p < q) & (a < 0) & (far > region.dppo_mask_low)
        dropped |= up | down
    return dropped


def effective_sample_size(policy_logprobs: LogProbs, sampler_logprobs: LogProbs, mask: Mask) -> dict[str, Tensor]:
    """The effective sample size by the raw weights w, as a share: of n tokens, of n completions. 1 on-policy.

    Equation: (sum w)^2 / (n sum w^2), w = policy / sampler of a token, or its product over a completion.
    """
    delta = masked_log_ratio(policy_logprobs, sampler_logprobs, mask)

    def share(log_w: Tensor, counted: Tensor) -> Tensor:
        x = log_w.masked_fill(~counted, -math.inf).flatten()
        return ((2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp() / counted.sum()).clamp(max=1).nan_to_num(0.0)

    return {"sampler/ess": share(delta, mask), "sampler/ess_sequence": share(delta.sum(-1), mask.any(-1))}


def trm_bound(kl: TokenValues, mask: Mask) -> Tensor:
    """TRM's bound on |J(policy) - J(sampler) - E[R sum_t (w_t - 1)]|, for rewards R between 0 and 1.

    Equation: min(T (T - 1) D, 4/3 T^1.5 D, 2 T sqrt(D D_seq)). T = longest completion, D = largest KL of a prefix,
    D_seq = mean KL of a completion. An estimate, no guarantee: the bound needs D of all prefixes, not of those drawn.
    From 1 on it is empty: no two rewards differ by more.

    Shapes: `kl` exact KL(sampler||policy) in nats, `mask`, both [B, T] -> scalar. Source: arXiv:2512.23075
    """
    kl = masked(kl.detach(), mask)
    length, largest, of_completion = mask.sum(-1).max(), kl.max(), kl.sum() / mask.any(-1).sum().clamp(min=1)
    mixed = 2 * length * (largest * of_completion).sqrt()
    return torch.minimum(torch.minimum(length * (length - 1), 4 / 3 * length**1.5) * largest, mixed)
