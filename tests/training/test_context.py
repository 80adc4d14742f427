"""What the parts of a run share: how a step is divided, and on how much of it the exact KL is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.optim import SGD

from klamp.config.choices import SMALL_VOCABULARY
from klamp.training.rollouts import collect
from klamp.training.updates import update


@pytest.mark.parametrize(("rows", "parts"), [(12, 1), (12, 5), (12, 12), (7, 3), (3, 8), (1, 4), (3, 2**40)])
def test_parts_cover_every_row_once_in_order_and_near_equal(context_of, rows, parts):
    context = context_of(gradient_accumulation_steps=parts)
    slices = list(context.parts(rows))
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in slices]
    assert len(sizes) == min(rows, parts)
    assert max(sizes) - min(sizes) <= 1


def test_small_vocabularies_have_their_exact_kl_everywhere_and_large_ones_once_a_group(context_of):
    context = context_of()
    assert context.exact_completions == 4
    assert replace(context, vocabulary=SMALL_VOCABULARY + 1).exact_completions == 1


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
    context = replace(context_of(beta=0.1, **changes), vocabulary=vocabulary)
    assert context.exact_directions == (("reverse", "forward") if both else ("reverse",))
    rollout = collect(context, context.task.train[:3], step=0, beta=0.1)
    output = update(context, SGD(context.policy.parameters(), lr=0.0), rollout, context.objective)
    assert output.exact is not None and (output.exact_forward is not None) == both
