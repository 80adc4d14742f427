"""The reference length: the reference's own mean, measured once, whatever the policy has become."""

from __future__ import annotations

import json

import pytest
from tests.training.conftest import disturb
from tests.training.test_sampling import tokens_of

from klamp.training.reference_length import measure_reference_length
from klamp.training.sampling import encode_prompts, generate, uniform_numbers

CLIP = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


def by_hand(context, model) -> float:
    """Mean completion length of a model, one prompt at a time."""
    rollout, lengths = context.config.rollout, []
    prompts = [e.prompt for e in context.task.train[:64]]
    uniforms = uniform_numbers(context.config.run.seed, -1, len(prompts), rollout.max_completion_length)
    for prompt, row in zip(prompts, uniforms, strict=True):
        ids, mask = encode_prompts([prompt], context.tokenizer, context.device)
        found = generate(model, ids, mask, rollout=rollout, stop=context.stop, pad=context.pad, uniforms=row[None])
        lengths += [len(t) for t in tokens_of(found)]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("changes", [{}, {"lora_r": 2}])
def test_it_is_the_mean_length_of_the_reference_not_of_the_policy(context_of, changes):
    context = context_of(**CLIP, **changes, max_completion_length=12, train_size=40)
    disturb(context.policy, size=0.2)
    measure_reference_length(context)
    with context.reference.sampling_model() as model:
        expected = by_hand(context, model)
    assert context.control.reference_length == pytest.approx(expected)
    assert context.control.reference_length != pytest.approx(by_hand(context, context.policy)), (
        "the policy writes otherwise"
    )


def test_it_is_measured_once(context_of):
    context = context_of(**CLIP)
    context.control.reference_length = 3.25
    measure_reference_length(context)
    assert context.control.reference_length == 3.25


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({**CLIP, "use_per_token_kl_threshold": False}, None),
        ({**CLIP, "kl_reference_length": 7}, 7),
        ({**CLIP, "beta": 0.0}, None),
    ],
)
def test_it_is_measured_only_where_a_budget_needs_it(context_of, changes, expected):
    context = context_of(**changes)
    measure_reference_length(context)
    assert context.control.reference_length == expected


def test_it_is_not_measured_where_every_row_brings_its_own(context_of, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "answer": "2", "n": 3 + i}) for i in range(4)))
    settings = {"task": str(file), "eval_split": str(file), "reference_length_column": "n"}
    context = context_of(**settings, **CLIP)
    measure_reference_length(context)
    assert context.control.reference_length is None
