"""The arithmetic of the rules."""

from __future__ import annotations

import math

import pytest
import torch

from klamp.diagnostics.alarm import is_apart, noise, number


def test_noise_is_the_deviation_around_a_course() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = (3 * torch.randn(4000, generator=generator)).tolist()
    rising = [x + 0.01 * i for i, x in enumerate(flat)]
    assert noise(flat) == pytest.approx(3, rel=0.05)
    assert noise(rising) == pytest.approx(3, rel=0.05)
    assert noise([1.0, 1.0, 1.0]) == 0


def test_apart_counts_standard_errors_of_the_difference() -> None:
    low, high = [0.0, 1.0] * 8, [2.0, 3.0] * 8
    error = math.sqrt(2 * 0.5 / 16)  # neighbours differ by 1: the variance of the noise is 1/2
    assert is_apart(low, high, errors=1.99 / error)
    assert not is_apart(low, high, errors=2.01 / error)
    assert is_apart(high, low, errors=1.0)
    assert not is_apart(low, low, errors=0.1)
    assert not is_apart([1.0], [9.0, 9.0], errors=0.0)


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (12345.0, "1.23e+04"), (0.0, "0")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
