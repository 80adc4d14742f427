"""What the parts of a run share: how a step is divided, and on how much of it the exact KL is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from klamp.training.context import SMALL_VOCABULARY


@pytest.mark.parametrize(("rows", "parts"), [(12, 1), (12, 5), (12, 12), (7, 3), (3, 8), (1, 4)])
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
