"""A run, and the runs of an ablation, as they go: in a log and on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info

from klamp.ablation.executor import Update
from klamp.ablation.plan import Plan, grid, runs
from klamp.cli.arguments import parse_train
from klamp.cli.display import COLUMNS, LEGEND, ROWS, Board, Display, Drawn, columns_for, heading, skill_rows
from klamp.diagnostics.metrics import METRICS


def console(*, terminal: bool, width: int = 110, height: int = 42) -> Console:
    return Console(file=Log(), force_terminal=terminal, width=width, height=height, color_system=None)


def text_of(display: Display | Board) -> str:
    return display.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


class Log(io.StringIO):
    """A file that counts how often it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1
        super().flush()


class Gone(io.StringIO):
    """A reader that has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The displays' clock, by hand."""
    now = {"seconds": 0.0}
    monkeypatch.setattr(Drawn, "clock", lambda self: now["seconds"])
    return now


def play(*flags: str, start_step: int = 0, steps: int | None = None, on: Console | None = None) -> Display:
    """A display that has seen a run, or its first steps."""
    display, config = Display(on or console(terminal=False)), parse_train(flags).config
    display.on_start(run_info(config, Path("out"), start_step=start_step))
    if not start_step:
        display.on_evaluation(0, BEFORE)
    for step in range(start_step + 1, (config.run.max_steps if steps is None else steps) + 1):
        display.on_step(step, metrics_at(step, config))
    if steps is None:
        display.on_evaluation(config.run.max_steps, AFTER)
    return display


def rows_of(display: Display) -> list[str]:
    return [line for line in text_of(display).splitlines() if line.endswith("12,345")]


def drawn(display: Display) -> list[str]:
    """The picture, line by line."""
    shown = console(terminal=False, width=display.console.width)
    shown.print(display.picture())
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]  # pyright: ignore


def test_time_left_goes_by_the_speed_of_the_steps_that_were_taken(clock: dict[str, float]) -> None:
    display = play("--max_steps", "200", start_step=100, steps=100)
    assert (display.step, display.time_text()) == (100, "0:00 elapsed")
    clock["seconds"] = 10.0
    display.on_step(150, {})
    assert display.time_text() == "0:10 elapsed, 0:10 left"
    assert "continued after step 100" in text_of(display)


def test_the_heading_says_model_kl_reference_and_folder() -> None:
    assert heading(run_info(parse_train(["--target_kl", "0.05"]).config, Path("out"))) == [
        "arithmetic · builtin, 863k parameters · cpu",
        "KL: k3, gradient reverse per token, in the loss",
        "reference: a frozen copy of the starting policy · "
        "beta: hold controller from 0.01, towards 0.05 nats per token",
        "folder: out",
    ]
    without = heading(run_info(parse_train(["--beta", "0"]).config, Path("out")))
    assert without[1:] == ["KL: none: beta is 0", "folder: out"]
    info = replace(run_info(parse_train([]).config, Path("out")), changes="beta 0.1 -> 0.5")
    assert "changed: beta 0.1 -> 0.5" in heading(info)


@pytest.mark.parametrize(("steps", "lines"), [(5, 5), (20, 20), (200, 21), (205, 20), (10_000, 21)])
def test_about_twenty_lines_with_the_first_and_the_last_step_written_at_once(steps: int, lines: int) -> None:
    display = play("--max_steps", str(steps))
    rows = rows_of(display)
    assert len(rows) == lines
    assert (rows[0].split()[0], rows[-1].split()[0]) == ("1", str(steps))
    assert display.console.file.flushed >= lines  # pyright: ignore[reportAttributeAccessIssue]


def test_a_continued_run_has_as_many_lines() -> None:
    rows = rows_of(play("--max_steps", "210", start_step=10))
    assert [row.split()[0] for row in rows[:3]] == ["11", "20", "30"]


def test_rows_stand_under_their_titles() -> None:
    display = play("--max_steps", "5", "--kl_clip_method", "hard")
    head = next(line for line in text_of(display).splitlines() if line.strip().startswith("step  reward"))
    rows = rows_of(display)
    assert {len(row) for row in rows} == {len(head)}
    assert " ".join(rows[-1].split()) == "5 0.773 0.0005 0.0015 0.0015 25.0% 0.01 4.8 0.298 1.2% 0 12,345"
    assert head.index("exact") + 5 == rows[-1].rindex("0.0015") + 6
    assert LEGEND in text_of(display)


@pytest.mark.parametrize("terminal", [False, True])
def test_news_are_lines(terminal: bool) -> None:
    display = play("--max_steps", "5", on=console(terminal=terminal))
    for text in ("one", "two", "two"):
        display.on_warning(text)
    display.on_alarm(rise("kl-spike", 7))
    display.on_alarm(rise("kl-high", 7))  # a note
    display.on_alarm(rise("step-zero-kl", 7))  # the trainer says it as a caution
    display.close()
    text = text_of(display)
    assert "  evaluation after step 0: addition 76.2, subtraction 90.2, reversal 100.0   [0:00 elapsed" in text
    assert "after step 5: addition 93.8 (+17.6), subtraction 89.5 (−0.8), reversal 99.6 (−0.4)" in text
    assert (text.count("  caution: one\n"), text.count("  caution: two\n")) == (1, 1)
    assert "  alarm after step 7: kl-spike: the KL jumped (from .1 to .9)\n    next step: Look at the tokens" in text
    assert text.count("alarm after") == 1
    assert display.raised == {"kl-spike", "kl-high", "step-zero-kl"}


def test_a_terminal_has_the_last_steps_and_a_bar(clock: dict[str, float]) -> None:
    display = play("--max_steps", "60", "--kl_clip_method", "hard", steps=30, on=console(terminal=True))
    clock["seconds"] = 9.0
    lines = drawn(display)
    display.close()
    assert "━" in lines[0] and lines[0].startswith("step 30/60")
    assert lines[0].endswith("50%  0:09 elapsed, 0:09 left")
    assert " ".join(lines[2].split()) == "step reward KL k1 KL k3 exact over beta length entropy clip lr tok/s"
    assert " ".join(lines[-1].split()) == "30 0.847 0.0059 0.0068 0.0069 25.0% 0.01 4.8 0.257 1.2% 0.00015 12,345"
    assert [line.split()[0] for line in lines[3:]] == [str(step) for step in range(31 - ROWS, 31)]
    assert "30 0.847" in " ".join(text_of(display).split()), "it stays on the screen"


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("height", [10, 24])
def test_the_picture_is_never_larger_than_the_terminal(width: int, height: int) -> None:
    on = console(terminal=True, width=width, height=height)
    display = play("--kl_clip_method", "hard", "--target_kl", "0.05", steps=30, on=on)
    display.close()
    lines = drawn(display)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert lines[-1].split()[:2] == ["30", "0.847"]


def test_a_reader_that_leaves_ends_nothing() -> None:
    display = play(steps=1, on=Console(file=Gone()))
    assert display.step == 1
    board = Board(Console(file=Gone(), force_terminal=False), RUNS)
    board.tell(Update(run=A, state="running"))
    board.tell(Update(run=A, state="done"))
    assert board.rows[A].state == "done"


def test_every_column_shows_a_metric_and_its_values_fit() -> None:
    extreme = {"kl/k1": -9.9999, "beta": 1.23e-5, "train/learning_rate": 3e-4, "speed/tokens_per_second": 999_000.0}
    for column in COLUMNS:
        assert column.metric in METRICS
        assert len(column.title) <= column.width
        assert len(column.cell(extreme | {"kl/over_budget": 1.0, "policy/ratio_clipped": 1.0})) <= column.width + 1


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ([], {"over", "teacher"}),
        (["--kl_clip_method", "hard", "--teacher_model", "DIR"], set()),
    ],
)
def test_columns_are_those_that_the_run_logs(flags: list[str], missing: set[str]) -> None:
    shown = {column.title for column in columns_for(parse_train(flags).config)}
    assert shown == {column.title for column in COLUMNS} - missing


def test_the_trained_skill_comes_first_and_a_missing_score_is_a_dash() -> None:
    rows = skill_rows({"b": 0.5}, {"b": 0.25, "a": 1.0}, "a")
    assert rows == [("a (trained)", "–", "100.0", "–"), ("b", "50.0", "25.0", "−25.0")]


@pytest.mark.parametrize(
    ("total", "due"), [(3, [1, 2, 3]), (700, [1, 140, 280, 420, 560, 700]), (7, [1, 2, 3, 4, 5, 6, 7])]
)
def test_a_log_hears_of_it_at_its_start_and_end_and_some_times_between(total: int, due: list[int]) -> None:
    on = console(terminal=False)
    drawn = Drawn(on)
    for done in range(1, total + 1):
        drawn.on_loading("x", done, total, None)
    assert on.file.getvalue().splitlines() == [f"x: {done}/{total}" for done in due]


RUNS = runs(Plan(base={"max_steps": 8}, arms=grid({"beta": [0.0, 0.1]}), seeds=(0, 1)))
A, B, C, D = (run.name for run in RUNS)
NUMBERS = {"reward": 0.75, "kl/reverse": 0.0321, "length": 4.5}


def at(run: str, step: int, **metrics: float) -> Update:
    return Update(run=run, state="running", step=step, steps=8, metrics={"reward": 0.1 * step, **metrics})


def sweep(board: Board, clock) -> None:
    """One kept, one done, one failed, one interrupted."""
    board.tell(Update(run=A, state="kept", step=8, steps=8, metrics=NUMBERS))
    for name in (B, C, D):
        board.tell(Update(run=name, state="waiting", steps=8))
    board.tell(Update(run=B, state="running", steps=8))
    for step in range(1, 9):
        clock["seconds"] += 2.0
        board.tell(at(B, step, **{"kl/k3": 0.01 * step, "kl/exact": 0.02, "length/mean": 5.0}))
    board.tell(Update(run=B, state="done", step=8, steps=8, metrics=NUMBERS))
    board.tell(Update(run=C, state="running", steps=8))
    board.tell(Update(run=C, state="failed", step=3, steps=8, text="the process was killed"))
    board.tell(Update(run=D, state="running", steps=8))
    board.tell(at(D, 1))
    board.tell(Update(run=D, state="stopping"))


def test_lines_for_logs(clock) -> None:
    board = Board(console(terminal=False), RUNS)
    sweep(board, clock)
    board.close()
    lines = text_of(board).splitlines()
    assert "\x1b" not in text_of(board)
    numbers = "step 8/8, reward 0.750, KL 0.0321, length 4.5"
    assert lines[0] == f"[1/4 ended, 0:00 elapsed] beta=0, seed 0: done before, {numbers}"
    mine = [line for line in lines if "beta=0.1, seed 0:" in line]
    steps = [line.partition("seed 0: ")[2].split(",")[1] for line in mine[1:5]]
    assert steps == [f" step {step}/8" for step in (2, 4, 6, 8)], "four lines between its beginning and its end"
    assert "KL 0.0200, length 5.0" in mine[1] and "elapsed, 0:44 left" in mine[1]
    assert "done, step 8/8, reward 0.750, KL 0.0321" in mine[-1]
    assert any(line.endswith("beta=0, seed 1: failed: the process was killed") for line in lines)
    assert lines[-1].endswith("stopping, step 1/8, reward 0.100, KL -, length -")


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
        plain.on_loading("teaching the built-in base model", done, 100, 1.0 / done)
    lines = text_of(plain).splitlines()
    assert lines[0] == "teaching the built-in base model: 1/100, loss 1.000" and len(lines) == 6
    live = Board(console(terminal=True), RUNS)
    live.on_loading("teaching the built-in base model", 50, 100, 0.5)
    live.close()
    assert "teaching the built-in base model, once" in text_of(live) and "50/100, loss 0.500" in text_of(live)
