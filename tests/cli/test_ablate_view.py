"""The display of an ablation, told what a sweep tells."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from klamp.ablation.executor import Update
from klamp.ablation.plan import Plan, grid, runs
from klamp.cli.ablate_view import Board

RUNS = runs(Plan(base={"max_steps": 8}, arms=grid({"beta": [0.0, 0.1]}), seeds=(0, 1)))
A, B, C, D = (run.name for run in RUNS)
NUMBERS = {"reward": 0.75, "kl/reverse": 0.0321, "length": 4.5}


def console(*, terminal: bool, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, height=height, color_system=None)


def text_of(board: Board) -> str:
    return board.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def clock(monkeypatch):
    """The boards' clock, by hand."""
    now = {"seconds": 0.0}
    monkeypatch.setattr(Board, "clock", lambda self: now["seconds"])
    return now


def at(run: str, step: int, **metrics: float) -> Update:
    return Update(run=run, state="running", step=step, steps=8, metrics={"reward": 0.1 * step, **metrics})


def sweep(board: Board, clock) -> None:
    """One kept, one done with an alarm, one failed, one interrupted."""
    board.tell(Update(run=A, state="kept", step=8, steps=8, metrics=NUMBERS))
    for name in (B, C, D):
        board.tell(Update(run=name, state="waiting", steps=8))
    board.tell(Update(run=B, state="running", steps=8))
    for step in range(1, 9):
        clock["seconds"] += 2.0
        board.tell(at(B, step, **{"kl/k3": 0.01 * step, "kl/exact": 0.02, "length/mean": 5.0}))
    board.tell(Update(run=B, state="running", step=8, steps=8, text="kl-spike: the KL jumps"))
    board.tell(Update(run=B, state="measuring", step=8, steps=8))
    board.tell(Update(run=B, state="done", step=8, steps=8, metrics=NUMBERS))
    board.tell(Update(run=C, state="running", steps=8))
    board.tell(Update(run=C, state="failed", step=3, steps=8, text="the process was killed"))
    board.tell(Update(run=D, state="running", steps=8))
    board.tell(at(D, 1))
    board.tell(Update(run=D, state="stopping"))
    board.tell(at(D, 2))


def test_lines_for_logs(clock) -> None:
    board = Board(console(terminal=False), RUNS)
    sweep(board, clock)
    board.close()
    lines = text_of(board).splitlines()
    assert "\x1b" not in text_of(board)
    numbers = "step 8/8, reward 0.750, KL 0.0321, length 4.5"
    assert lines[0] == f"[1/4 ended, 0:00 elapsed] beta=0, seed 0: done before, {numbers}"
    mine = [line for line in lines if "beta=0.1, seed 0:" in line]
    assert [line.partition("seed 0: ")[2].split(",")[1] for line in mine[1:5]] == [
        " step 2/8",
        " step 4/8",
        " step 6/8",
        " step 8/8",
    ], "four lines between its beginning and its end"
    assert "KL 0.0200, length 5.0" in mine[1] and "about 0:44 left" in mine[1]
    assert "done, step 8/8, reward 0.750, KL 0.0321" in mine[-1]
    assert "  alarm in beta=0.1, seed 0: kl-spike: the KL jumps" in lines
    assert any(line.endswith("beta=0, seed 1: failed: the process was killed") for line in lines)
    assert lines[-1].endswith("stopping, step 1/8, reward 0.100, KL -, length -")


def test_on_a_terminal_a_bar_stays_below_the_lines(clock) -> None:
    board = Board(console(terminal=True), RUNS)
    sweep(board, clock)
    board.close()
    assert "beta=0.1, seed 0: done, step 8/8" in text_of(board)
    board.console.file = io.StringIO()
    board.console.print(board.picture())
    line = text_of(board).strip()
    assert line.startswith("1 done before, 1 done, 1 failed, 1 stopping  ") and "81%  0:16 elapsed" in line


def test_time_left_is_that_of_the_steps_that_are_left(clock) -> None:
    board = Board(console(terminal=False), RUNS)
    assert board.seconds_left() is None
    board.tell(Update(run=A, state="kept", step=8, steps=8))
    clock["seconds"] = 10.0
    board.tell(Update(run=B, state="running", step=4, steps=8))
    assert board.seconds_left() is None, "it begins at a checkpoint; no step has been taken"
    board.tell(at(B, 5))
    board.tell(at(B, 6))
    assert board.seconds_left() == pytest.approx(5.0 * (2 + 8 + 8))
    board.tell(Update(run=C, state="failed", step=0, steps=8))
    assert board.seconds_left() == pytest.approx(5.0 * (2 + 8))


def test_the_base_model_is_shown_while_it_is_taught(clock) -> None:
    plain = Board(console(terminal=False), RUNS)
    for done in range(1, 101):
        plain.loading("teaching the built-in base model", done, 100, 1.0 / done)
    lines = text_of(plain).splitlines()
    assert lines[0] == "teaching the built-in base model: 1/100, loss 1.000" and len(lines) == 6
    live = Board(console(terminal=True), RUNS)
    live.loading("teaching the built-in base model", 50, 100, 0.5)
    live.close()
    assert "teaching the built-in base model, once" in text_of(live) and "50/100, loss 0.500" in text_of(live)


def test_a_reader_that_leaves_does_not_stop_the_runs(clock) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    board = Board(Console(file=Gone(), force_terminal=False), RUNS)
    board.tell(Update(run=A, state="running"))
    board.tell(Update(run=A, state="done"))
    assert board.rows[A].state == "done"
