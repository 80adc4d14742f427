"""Rollouts: groups, rewards, masks, what is measured."""

from dataclasses import replace

import pytest
import torch
from tests.training import rewards
from tests.training.conftest import IN_REWARD, disturb, rollout_of
from tests.training.test_sampling import tokens_of
from torch.optim import SGD

from klamp.config.kl import SMALL_VOCABULARY
from klamp.lab.rollouts import collect, measure_reference_length
from klamp.lab.sampling import encode_prompts, generate, uniform_numbers
from klamp.lab.updates import update


def test_groups_stand_together_and_every_completion_has_its_own_reward(context_of):
    context = context_of()
    rollout = rollout_of(context, beta=0.1)
    assert [e.prompt for e in rollout.examples] == [e.prompt for e in context.task.train[:3] for _ in range(4)]
    assert rollout.rewards.tolist() == pytest.approx([rewards.digits(text) for text in rollout.texts])
    assert rollout.rewards.std() > 0
    for start in range(0, 12, 4):
        group, advantages = rollout.rewards[start : start + 4], rollout.advantages[start : start + 4]
        expected = group - (group.sum() - group) / 3  # against the mean of the others
        torch.testing.assert_close(advantages, expected)
    tokens = sum(len(t) for t in tokens_of(rollout.completions))
    assert (rollout.totals.sequences, rollout.totals.tokens, rollout.totals.kl_tokens) == (12, tokens, tokens)


def test_truncated_completions_can_be_left_out(context_of):
    rollout = rollout_of(context_of(mask_truncated_completions=True), beta=0.1)
    ended = rollout.completions.ended
    assert 0 < ended.sum() < 12
    assert torch.equal(rollout.mask, rollout.completions.mask & ended[:, None])
    assert rollout.totals.tokens == rollout.completions.mask[ended].sum()
    assert rollout.totals.sequences == 12
    everything = rollout_of(context_of(), beta=0.1)
    assert torch.equal(everything.mask, everything.completions.mask)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 0),
        ({"kl_estimator": "exact", "kl_horizon": "sequence"}, 0),
        ({"kl_estimator": "k1", "kl_placement": "advantage"}, 0),
        ({"kl_clip_method": "hard", "kl_reference_length": 5}, 1),
        (IN_REWARD | {"loss_type": "dr_grpo"}, 1),
    ],
)
def test_the_policy_scores_before_the_update_only_where_something_depends_on_it(context_of, changes, passes):
    context, calls = context_of(**changes), []
    context.scorer.register_forward_hook(lambda *_: calls.append(1))
    rollout = rollout_of(context, beta=0.1)
    assert len(calls) == passes
    assert (rollout.old_logprobs is not None) == bool(passes)


def test_reference_lengths_come_with_the_prompts_or_from_the_run(context_of):
    context = context_of(kl_clip_method="hard", kl_clip_threshold=0.1)
    context.control.reference_length = 9.0
    examples = [replace(e, reference_length=n) for e, n in zip(context.task.train, (None, 1, 2), strict=False)]
    rollout = collect(context, examples, step=0, terms=context.objective.weighted(0.1).terms)
    assert rollout.reference_length.tolist() == [9.0] * 4 + [1.0] * 4 + [2.0] * 4
    context = context_of(kl_clip_method="hard", kl_clip_threshold=0.1, kl_reference_length=7)
    rollout = collect(context, examples, step=0, terms=context.objective.weighted(0.1).terms)
    assert rollout.reference_length.tolist() == [7.0] * 12, "the user's number comes first, as in every host"


def test_excluded_tokens_leave_the_kl_and_stay_in_the_loss(context_of):
    rollout = rollout_of(context_of(kl_exclude_tokens=(5, 9)), beta=0.1)
    ids = rollout.completions.ids
    assert torch.equal(rollout.kl_mask, rollout.mask & (ids != 5) & (ids != 9))
    assert 0 < rollout.kl_mask.sum() < rollout.mask.sum()
    assert float(rollout.totals.tokens) == float(rollout.mask.sum())
    assert float(rollout.totals.kl_tokens) == float(rollout.kl_mask.sum())


CLIP = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


def by_hand(context, model) -> float:
    rollout, lengths = context.config.rollout, []
    prompts = [e.prompt for e in context.task.train[:64]]
    uniforms = uniform_numbers(context.config.run.seed, -1, len(prompts), rollout.max_completion_length)
    for prompt, row in zip(prompts, uniforms, strict=True):
        ids, mask = encode_prompts([prompt], context.tokenizer, context.device)
        drawn = generate(model, ids, mask, rollout=rollout, stop=context.stop, pad=context.pad, uniforms=row[None])
        lengths += drawn.mask.sum(-1).tolist()
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("changes", [{}, {"lora_r": 2}])
def test_it_is_the_mean_length_of_the_reference_not_of_the_policy(context_of, changes):
    context = context_of(**CLIP, **changes, max_completion_length=12, train_size=40)
    disturb(context.policy, size=0.2)
    measure_reference_length(context)
    with context.reference.sampling_model() as model:
        expected = by_hand(context, model)
    assert context.control.reference_length == pytest.approx(expected)
    assert context.control.reference_length != pytest.approx(by_hand(context, context.policy)), "it writes otherwise"


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, None),
        ({**CLIP, "use_per_token_kl_threshold": False}, None),
        ({**CLIP, "kl_reference_length": 7}, 7),
        ({**CLIP, "beta": 0.0}, None),
        (CLIP, 3.25),
    ],
)
def test_it_is_measured_once_and_only_where_a_budget_needs_it(context_of, changes, length):
    context = context_of(**changes)
    context.control.reference_length = length
    measure_reference_length(context)
    assert context.control.reference_length == length


@pytest.mark.parametrize(("rows", "parts"), [(12, 1), (12, 5), (12, 12), (7, 3), (3, 8), (1, 4), (3, 2**40)])
def test_parts_cover_every_row_once_in_order_and_near_equal(context_of, rows, parts):
    context = context_of(gradient_accumulation_steps=parts)
    slices = list(context.parts(rows))
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in slices]
    assert len(sizes) == min(rows, parts)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("changes", "vocabulary", "both"),
    [
        ({}, SMALL_VOCABULARY, True),
        ({}, SMALL_VOCABULARY + 1, False),
        ({"exact_kl_completions": 1}, SMALL_VOCABULARY + 1, True),
        ({"kl_estimator": "exact"}, SMALL_VOCABULARY + 1, False),
        ({"kl_estimator": "exact", "kl_gradient": "forward"}, SMALL_VOCABULARY + 1, True),
    ],
)
def test_the_forward_kl_of_a_large_vocabulary_is_measured_where_it_is_asked_for(context_of, changes, vocabulary, both):
    context = context_of(beta=0.1, **changes)
    context.vocabulary = vocabulary
    assert context.exact_directions == (("reverse", "forward") if both else ("reverse",))
    rollout = rollout_of(context, beta=0.1)
    output = update(context, SGD(context.policy.parameters(), lr=0.0), rollout, context.objective)
    assert output.scores.exact is not None and (output.scores.exact_forward is not None) == both


def test_the_distance_from_the_old_policy_is_k3_of_what_sampled(context_of):
    """KL(old||policy), and not the other way round: k3 of log old - log policy, over the trained tokens."""
    context = context_of(num_iterations=2)
    rollout = rollout_of(context, beta=0.1)
    old = rollout.completions.sampler_logprobs - 0.5
    output = update(
        context, SGD(context.policy.parameters(), lr=0.0), replace(rollout, old_logprobs=old), context.objective
    )
    moved = (output.scores.logprobs - old)[rollout.mask]
    assert output.losses["policy/kl_old"] == pytest.approx((moved.exp() - 1 - moved).mean().item(), rel=1e-5)
