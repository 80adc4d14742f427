"""What the trainer measures of a step: the tokens of all processes, beta and its price, completions to look at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from klamp.config.loss import configured_price, spread_of_group
from klamp.diagnostics.statistics import StepRecord, pad_tokens, repeated_pairs
from klamp.training.context import Context
from klamp.training.rollouts import Rollout
from klamp.training.updates import UpdateOutput


def gather_record(context: Context, rollout: Rollout, output: UpdateOutput) -> StepRecord:
    """Collect the tokens of the step from all processes; every process gets all of them."""
    length = context.config.rollout.max_completion_length

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else context.gather(pad_tokens(x, length) if x.ndim == 2 else x)

    def certain(x: Tensor) -> Tensor:
        return context.gather(pad_tokens(x, length) if x.ndim == 2 else x)

    return StepRecord(
        mask=certain(rollout.mask),
        kl_mask=certain(rollout.kl_mask),
        policy=certain(output.policy_logprobs),
        sampler=whole(rollout.completions.sampler_logprobs if rollout.sampler_tells else None),
        entropy=whole(output.entropy),
        rewards=certain(rollout.rewards),
        ended=certain(rollout.completions.ended),
        lengths=certain(rollout.completions.mask.sum(-1)),
        repeated=certain(repeated_pairs(rollout.completions.ids, rollout.completions.mask)),
        ref=whole(rollout.ref_logprobs),
        ref_rows=None if rollout.kl_weight is None else context.gather(rollout.kl_weight > 0),
        original=whole(rollout.original_logprobs),
        exact=whole(output.exact),
        exact_forward=whole(output.exact_forward),
        exact_rows=whole(rollout.exact_rows),
    )


def control_metrics(context: Context, beta: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """beta in force, its price, and what the controller logs."""
    config = context.config
    price = configured_price(
        config.kl,
        config.loss,
        group_size=config.rollout.num_generations,
        mean_length=metrics["length/mean"],
        max_length=config.rollout.max_completion_length,
        beta=beta,
    )
    return context.control.metrics(price, spread_of_group(metrics["reward_std"], metrics["groups/saturated"]))


def speed(tokens: float, seconds: float) -> dict[str, float]:
    """How long a step took, and its tokens per second; without these where the clock stood still."""
    found = {"speed/step_seconds": seconds}
    return found | {"speed/tokens_per_second": tokens / seconds} if seconds > 0 else found


def completion_row(context: Context, rollout: Rollout, output: UpdateOutput, i: int) -> dict[str, object]:
    """A completion with its tokens and their log-probabilities, as a line of completions.jsonl."""
    mask = rollout.completions.mask[i]
    ids = rollout.completions.ids[i][mask].tolist()
    row: dict[str, object] = {
        "prompt": rollout.examples[i].prompt,
        "completion": rollout.texts[i],
        "answer": rollout.examples[i].answer,
        "reward": float(rollout.rewards[i]),
        "advantage": float(rollout.advantages[i]),
        "tokens": context.tokenizer.convert_ids_to_tokens(ids),
        "policy_logprobs": output.policy_logprobs[i][mask].tolist(),
        "ended": bool(rollout.completions.ended[i]),
    }
    if rollout.sampler_tells:
        row["sampler_logprobs"] = rollout.completions.sampler_logprobs[i][mask].tolist()
    if not torch.equal(rollout.mask[i], mask):
        row["trained"] = rollout.mask[i][mask].tolist()
    if rollout.ref_logprobs is not None and (rollout.kl_weight is None or rollout.kl_weight[i] > 0):
        row["ref_logprobs"] = rollout.ref_logprobs[i][mask].tolist()
    return row
