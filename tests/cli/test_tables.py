"""Tables and paragraphs without a terminal: aligned, wrapped, complete."""

from __future__ import annotations

import io

from klamp.cli.tables import WIDTH, show_paragraph, show_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_table_is_aligned() -> None:
    out = io.StringIO()
    show_table(out, "title", ("a", "long heading"), [("x", "1"), ("wide cell", "2")])
    assert out.getvalue() == "title\n  a          long heading\n  x          1\n  wide cell  2\n"


def test_a_table_without_headings_has_no_head() -> None:
    out = io.StringIO()
    show_table(out, "title", ("", ""), [("ok", "1")])
    assert out.getvalue() == "title\n  ok  1\n"


def test_a_terminal_gets_the_same_cells() -> None:
    out = Terminal()
    show_table(out, "title", ("a", "b"), [("FAIL", "why")], styles={"FAIL": "red"})
    assert all(text in out.getvalue() for text in ("title", "a", "b", "FAIL", "why"))


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
