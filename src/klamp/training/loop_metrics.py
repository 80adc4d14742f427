"""What `klamp.training.loop` records of a step, from scores that its micro-batches have anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.config.price import configured_price, spread_of_group
from klamp.core.types import LogProbs
from klamp.diagnostics.statistics import StepRecord, repeated_pairs, step_metrics
from klamp.hosts.common.control import beta_metrics
from klamp.scoring.completions import Completions
from klamp.scoring.scores import Scores, joined
from klamp.training.config import RolloutConfig

PartScores = tuple[Scores, Scores | None]
"""What the policy, with its entropy, and the reference gave for a micro-batch; without gradient and logits."""


def part_scores(policy: Scores, ref_log_probs: LogProbs | None) -> PartScores:
    """Keep of a micro-batch's scores what its metrics need.

    The entropy comes from logits that are held for the gradient; a completion at a time, so that it copies few of them.

    Args:
        policy: the scores of B completions, with gradient.
        ref_log_probs: [B, T] under the reference; None: there is none.
    """
    entropy = None
    if policy.logits is not None:
        entropy = torch.stack([torch.special.entr(row.softmax(-1)).sum(-1) for row in policy.logits.detach()])
    ref = None if ref_log_probs is None else Scores(logprobs=ref_log_probs.detach())
    return Scores(logprobs=policy.logprobs.detach(), entropy=entropy), ref


def measure_tokens(
    completions: Completions,
    rewards: Tensor,
    parts: Sequence[PartScores],
    *,
    rollout: RolloutConfig,
    kl: KLConfig,
    loss: LossConfig,
) -> dict[str, float]:
    """What the tokens of a step give, under klamp's names, with beta and its price.

    Args:
        completions: all of the step, B of them.
        rewards: [B]
        parts: the scores of consecutive micro-batches, which are all of the completions together.
        rollout: how they were sampled.
        kl: the KL term of the loss.
        loss: the policy loss and the advantages.
    """
    length, group = completions.ids.shape[1], rollout.num_generations
    policy = joined([part for part, _ in parts], length)
    refs = [ref for _, ref in parts if ref is not None]
    record = StepRecord(
        mask=completions.mask,
        kl_mask=completions.mask,
        policy=policy.logprobs,
        sampler=completions.sampler_logprobs,
        rewards=rewards,
        ended=completions.ended,
        lengths=completions.mask.sum(-1),
        repeated=repeated_pairs(completions.ids, completions.mask),
        entropy=policy.entropy,
        ref=joined(refs, length).logprobs if refs else None,
    )
    found = step_metrics(record, group_size=group, max_length=rollout.max_completion_length)
    price = configured_price(
        kl, loss, group_size=group, mean_length=found["length/mean"], max_length=rollout.max_completion_length
    )
    return found | beta_metrics(price, spread_of_group(found["reward_std"], found["groups/saturated"]))
