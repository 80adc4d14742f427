"""What is measured of a step beside its tokens: beta and its price, and completions to look at."""

from __future__ import annotations

import pytest
import torch

from klamp.training.measurement import completion_row, control_metrics, gather_record, speed
from klamp.training.rollouts import collect
from klamp.training.updates import update

SEEN = {"length/mean": 5.0, "reward_std": 0.3, "groups/saturated": 0.25}


def test_beta_and_its_price(context_of):
    exact = {"loss_type": "dr_grpo", "advantage_baseline": "leave_one_out"}
    context = context_of(**exact)
    assert control_metrics(context, 0.06, SEEN) == {"beta": 0.06, "beta/price": 0.06}
    assert control_metrics(context, 0.0, SEEN) == {"beta": 0.0, "beta/price": 0.0}
    averaged = context_of(**exact, kl_normalizer="token_mean", max_completion_length=8)
    assert control_metrics(averaged, 0.06, SEEN)["beta/price"] == pytest.approx(0.06 * 8 / 5)


def test_divided_by_the_std_the_price_is_that_of_the_groups_that_teach_something(context_of):
    context = context_of(scale_rewards="std", advantage_baseline="leave_one_out")
    assert control_metrics(context, 0.06, SEEN)["beta/price"] == pytest.approx(0.06 * 0.4)
    assert control_metrics(context, 0.06, SEEN | {"reward_std": 0.0, "groups/saturated": 1.0}) == {"beta": 0.06}


def test_speed_is_none_where_the_clock_stands_still():
    assert speed(30.0, 1.5) == {"speed/step_seconds": 1.5, "speed/tokens_per_second": 20.0}
    assert speed(30.0, 0.0) == {"speed/step_seconds": 0.0}


def test_a_record_holds_the_step_as_it_was_before_the_update(context_of):
    context = context_of()
    rollout = collect(context, context.task.train[:3], step=0, beta=0.01)
    optimizer = torch.optim.SGD(context.policy.parameters(), lr=0.1)
    output = update(context, optimizer, rollout, context.objective)
    record = gather_record(context, rollout, output)
    length = context.config.rollout.max_completion_length
    assert record.mask.shape == record.policy.shape == record.exact.shape == (12, length)
    assert torch.equal(record.policy[record.mask], output.policy_logprobs[rollout.mask])
    assert torch.equal(record.ref[record.mask], rollout.ref_logprobs[rollout.mask])
    assert torch.equal(record.lengths, rollout.completions.mask.sum(-1))
    assert record.original is None

    row = completion_row(context, rollout, output, 5)
    kept = rollout.completions.mask[5]
    assert row["prompt"] == context.task.train[1].prompt and row["answer"] == context.task.train[1].answer
    assert row["tokens"] == context.tokenizer.convert_ids_to_tokens(rollout.completions.ids[5][kept].tolist())
    assert row["advantage"] == float(rollout.advantages[5]) and row["reward"] == float(rollout.rewards[5])
    assert row["ref_logprobs"] == rollout.ref_logprobs[5][kept].tolist()
