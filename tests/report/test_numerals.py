"""Numbers as a person writes them."""

from __future__ import annotations

import math

import pytest

from klamp.report.numerals import count, probability, rounded, setting, short, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1.0, "1"),
        (0.1234, "0.123"),
        (0.12, "0.12"),
        (0.0001234, "0.000123"),
        (0.00001234, "1.23e−5"),
        (-0.5, "−0.5"),
        (123.456, "123"),
        (123456.0, "123456"),
        (1e6, "1e6"),
        (163500000.0, "1.64e8"),
        (0.9996, "1"),
        (-3e-13, "−3e−13"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (None, "–"),
    ],
)
def test_short(value: float | None, text: str) -> None:
    assert short(value) == text


def test_digits() -> None:
    assert short(math.pi, digits=5) == "3.1416"
    assert short(123456789, digits=9) == "1.23456789e8"
    assert short(2500, digits=9) == "2500"


def test_signed() -> None:
    assert (signed(0.25), signed(-0.25), signed(0)) == ("+0.25", "−0.25", "0")


@pytest.mark.parametrize(
    ("logprob", "text"),
    [
        (0.0, "100 %"),
        (math.log(0.5), "50.0 %"),
        (math.log(0.0123), "1.2 %"),
        (math.log(0.00012), "0.012 %"),
        (math.log(1e-9), "1e−7 %"),
        (math.log(0.99991), "99.991 %"),
        (-2000.0, "0 %"),
        (0.1, "100 %"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_probability(logprob: float | None, text: str) -> None:
    assert probability(logprob) == text


def test_count() -> None:
    assert (count(1, "alarm"), count(0, "alarm"), count(12, "run")) == ("1 alarm", "0 alarms", "12 runs")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (1e-4, "0.0001"),
        ((0.1, 2), "0.1, 2"),
        ([], "(empty)"),
        ("", "(empty)"),
        (3, "3"),
    ],
)
def test_setting(value: object, text: str) -> None:
    assert setting(value) == text


def test_rounded() -> None:
    assert [rounded(value, decimals=1) for value in (99.609, 100.0, -2.25, 0.0)] == ["99.6", "100.0", "−2.2", "0.0"]
    assert [rounded(value, decimals=1) for value in (None, math.nan, math.inf)] == ["–", "NaN", "∞"]
    assert rounded(99.609, decimals=None) == "99.61" and rounded(99.609, decimals=None, digits=3) == "99.6"
