"""Numbers, tables, columns and curves as they are written."""

from __future__ import annotations

import io

import pytest

from klamp.cli.text import (
    WIDTH,
    duration,
    fixed,
    percent,
    short,
    show_paragraph,
    show_table,
    thousands,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (-0.01234, "-0.0123"),
        (0.0, "0.0000"),
        (1.2e-7, "1e-07"),
        (123456.0, "1e+05"),
        (12.5, "12.5000"),
    ],
)
def test_fixed(value: float, text: str) -> None:
    assert fixed(4)(value) == text


def test_what_is_not_a_number_is_shown_as_such() -> None:
    assert (fixed(3)(float("nan")), fixed(3)(float("inf"))) == ("nan", "inf")


def test_other_numbers() -> None:
    assert (short(0.01), short(3e-4), short(0.0), short(12345.0)) == ("0.01", "3.0e-04", "0", "1.2e+04")
    assert (percent(0.0123), thousands(999.6), thousands(12345.0)) == ("1.2%", "1000", "12.3k")
    assert (duration(61.6), duration(3661), duration(-1)) == ("1:02", "1:01:01", "0:00")


def test_a_plain_table_is_aligned() -> None:
    out = io.StringIO()
    show_table(out, "title", ("a", "long heading"), [("x", "1"), ("wide cell", "2")])
    assert out.getvalue() == "title\n  a          long heading\n  x          1\n  wide cell  2\n"


def test_a_table_without_headings_has_no_head() -> None:
    out = io.StringIO()
    show_table(out, "title", ("", ""), [("ok", "1")])
    assert out.getvalue() == "title\n  ok  1\n"


def test_paragraphs_are_wrapped_under_their_label() -> None:
    out = io.StringIO()
    show_paragraph(out, "word " * 60, label="label")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("  label        word")
    assert all(line.startswith(" " * 15 + "word") for line in lines[1:])
    assert max(map(len, lines)) <= WIDTH
    bare = io.StringIO()
    show_paragraph(bare, "text", width=0)
    assert bare.getvalue() == "  text\n"
