"""A random share of the sequences: unbiased, and with the variance that it says, by enumeration of all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from klamp.core.subsample import sequence_sample
from klamp.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "share", "count"), [(6, 0.5, 3), (5, 0.3, 2), (7, 0.01, 1), (4, 1.0, 4), (8, 0.99, 8)]
)
def test_weights_are_one_over_the_probability_of_being_drawn(size, share, count):
    weights = sequence_sample(size, share, generator=torch.Generator().manual_seed(0))
    assert weights.tolist().count(size / count) == count and weights.tolist().count(0.0) == size - count


@pytest.mark.parametrize(("size", "count"), [(5, 1), (5, 2), (6, 4), (6, 6)])
def test_mean_and_variance_over_all_subsets_are_those_of_the_docstring(size, count):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * 3 + 1
    sums = torch.stack([size / count * x[list(rows)].sum() for rows in combinations(range(size), count)])
    torch.testing.assert_close(sums.mean(), x.sum(), rtol=1e-12, atol=0)
    expected = size**2 * (1 / count - 1 / size) * x.var()
    torch.testing.assert_close(sums.var(correction=0), expected, rtol=1e-12, atol=1e-12)


def test_every_subset_is_drawn_equally_often():
    generator, draws = torch.Generator().manual_seed(0), 6000
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        rows = tuple(sequence_sample(5, 0.4, generator=generator).nonzero()[:, 0].tolist())
        seen[rows] = seen.get(rows, 0) + 1
    assert set(seen) == set(combinations(range(5), 2))
    spread = sum((n - draws / 10) ** 2 / (draws / 10) for n in seen.values())
    assert spread < 28, "chi-squared with 9 degrees of freedom: one seed in a thousand lies beyond"


def test_the_same_state_gives_the_same_subset():
    first, second, other = (sequence_sample(50, 0.5, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize(("size", "share"), [(4, 0.0), (4, 1.5), (4, float("nan")), (0, 0.5)])
def test_a_share_that_cannot_be_is_refused(size, share):
    with pytest.raises(ConfigError, match="share"):
        sequence_sample(size, share)
