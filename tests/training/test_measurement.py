"""What is measured of a step beside its tokens: beta in both units, and completions to look at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from klamp.training.measurement import beta_metrics, completion_row, gather_record
from klamp.training.rollouts import collect
from klamp.training.updates import update

SEEN = {"length/mean": 5.0, "reward": 0.7, "kl/k1_sequence": 2.0}


@pytest.mark.parametrize(
    ("reduction", "placement", "per_sequence"),
    [
        ("token_mean", "loss", 0.06 / 5),
        ("sequence_mean", "loss", 0.06 / 5),
        ("sequence_sum", "loss", 0.06),
        ("fixed_length", "loss", 0.06 / 6),
        ("token_mean", "advantage", 0.06),
        ("fixed_length", "reward", 0.06),
    ],
)
def test_beta_is_given_per_token_and_per_sequence(context_of, reduction, placement, per_sequence):
    context = context_of()
    term = replace(context.objective.kl, placement=placement)
    context.objective = replace(context.objective, kl=term)
    found = beta_metrics(reduction, 0.06, SEEN, context)
    assert found == {
        "beta": 0.06,
        "beta/per_sequence": pytest.approx(per_sequence),
        "reward/penalized": pytest.approx(0.7 - per_sequence * 2.0),
    }
    without = beta_metrics(reduction, 0.0, {"length/mean": 5.0, "reward": 0.7}, context)
    assert without == {"beta": 0.0, "beta/per_sequence": 0.0}


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
