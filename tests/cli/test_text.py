"""Numbers, tables and paragraphs as they are written; errors: four parts, once, and an exit code to rely on."""

import sys
import warnings

import pytest
from rich.console import Console

from klamp.cli.display import Display
from klamp.cli.text import cautions_shown, exit_code, say, show_caution, show_error, show_paragraph, show_table
from klamp.config import KLWarning
from klamp.errors import ConfigError, DataError, KlampError, ModelError, RewardError, TrainingStopped, UnknownNameError


def test_a_table_is_aligned_and_without_headings_it_has_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("title", ("a", "long heading"), [("x", "1"), ("wide cell", "2")])
    assert capsys.readouterr().out == "title\n  a          long heading\n  x          1\n  wide cell  2\n"
    show_table("title", ("", ""), [("ok", "1")])
    assert capsys.readouterr().out == "title\n  ok  1\n"


def test_a_terminal_folds_a_wide_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    headings = ("arm", *(f"a long heading, {i}" for i in range(6)))
    rows = [("beta=0.01", *(f"0.8{i}23 [0.{i}9, 0.8{i}]" for i in range(6)))]
    show_table("title", headings, rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_table("title", headings, rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for cell in rows[0] for word in cell.split())


HOSTILE = "a\x1b[31mred\x07\x9b2J\r\u202etxt"
SHOWN = r"a\x1b[31mred\x07\x9b2J\r\u202etxt"


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"\t{HOSTILE}\n\ud800")
    show_paragraph(HOSTILE, label="caution")
    show_caution(HOSTILE)
    show_error(DataError(HOSTILE, got=HOSTILE, why=HOSTILE, fix=HOSTILE))
    Display(Console(file=sys.stdout, force_terminal=True)).on_warning(HOSTILE)
    show_table(HOSTILE, (f"{HOSTILE}\n", "b"), [("x", "1")])
    out, err = capsys.readouterr()
    assert (out + err).count(SHOWN) == 10 and not set(out + err) & set("\x07\x9b\r\u202e")
    assert out.splitlines()[-1] == f"  x{' ' * (len(SHOWN) + 1)}  1", "and a table is aligned by what is shown"
    assert SHOWN + r"\n  b" in out and "\t" in out and r"\ud800" in out


def stopped_by(cause: BaseException | None) -> TrainingStopped:
    error = TrainingStopped("training was stopped after step 3 of 9")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no tokenizer"), 1),
        (ConfigError("no"), 2),
        (UnknownNameError("no"), 2),
        (stopped_by(KeyboardInterrupt()), 130),
        (stopped_by(None), 1),
    ],
)
def test_exit_codes(error: KlampError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_its_four_parts_and_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    error = RewardError("the reward raised", got="ZeroDivisionError", why="no score")
    error.fix = "return a number"
    error.add_note("  the state after step 3 is saved in out")
    show_error(error)
    assert capsys.readouterr().err == (
        "klamp: error: the reward raised\n"
        "  got: ZeroDivisionError\n"
        "  why: no score\n"
        "  fix: return a number\n"
        "  note: the state after step 3 is saved in out\n"
    )


def test_cautions_are_shown_once_each_and_without_pythons_format(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with cautions_shown():
        for text in ("k1 regularises nothing", "k1 regularises nothing", "another"):
            warnings.warn(text, KLWarning, stacklevel=1)
    assert capsys.readouterr().err == "klamp: caution: k1 regularises nothing\nklamp: caution: another\n"
    assert warnings.showwarning is before
