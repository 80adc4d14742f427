"""Errors and cautions: four parts, once, and an exit code that a script can rely on."""

from __future__ import annotations

import warnings

import pytest

from klamp.cli.errors import cautions_shown, exit_code, show_error, was_interrupted
from klamp.config import KLWarning
from klamp.errors import ConfigError, KlampError, ModelError, RewardError, TrainingStopped, UnknownNameError


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
    assert was_interrupted(error) == (code == 130)


def test_an_error_is_its_four_parts_and_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    error = RewardError("the reward raised", got="ZeroDivisionError", why="no score", fix="return a number")
    error.add_note("  the state after step 3 is saved in out")
    show_error(error)
    assert capsys.readouterr().err == (
        "klamp: error: the reward raised\n"
        "  got: ZeroDivisionError\n"
        "  why: no score\n"
        "  fix: return a number\n"
        "  note: the state after step 3 is saved in out\n"
    )


def test_parts_that_are_missing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ConfigError("beta must be a number >= 0", got=0))
    assert capsys.readouterr().err == "klamp: error: beta must be a number >= 0\n  got: 0\n"


def test_only_the_first_process_tells_what_all_of_them_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    show_error(ConfigError("beta"))
    assert capsys.readouterr().err == ""
    show_error(RewardError("the reward raised"))
    assert capsys.readouterr().err == "klamp: error in process 1: the reward raised\n"
    monkeypatch.setenv("RANK", "0")
    show_error(ConfigError("beta"))
    assert capsys.readouterr().err == "klamp: error: beta\n"


def test_cautions_are_shown_once_each_and_without_pythons_format(capsys: pytest.CaptureFixture[str]) -> None:
    with cautions_shown():
        for text in ("k1 regularises nothing", "k1 regularises nothing", "another"):
            warnings.warn(text, KLWarning, stacklevel=1)
    assert capsys.readouterr().err == "klamp: caution: k1 regularises nothing\nklamp: caution: another\n"


def test_other_warnings_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FutureWarning, match="soon"), cautions_shown():
        warnings.warn("soon", FutureWarning, stacklevel=1)
    assert "caution" not in capsys.readouterr().err


def test_afterwards_warnings_are_shown_as_before() -> None:
    before = warnings.showwarning
    with cautions_shown():
        assert warnings.showwarning is not before
    assert warnings.showwarning is before
