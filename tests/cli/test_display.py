"""A run as it goes, in a log and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info, summary_of

from klamp.cli.arguments import parse_train
from klamp.cli.display import ROWS, Display, LiveTable, Loading, LogLines, skill_rows


class Clocked(Display):
    """A display whose clock the test sets."""

    now_is = 0.0

    def clock(self) -> float:
        return self.now_is


@pytest.fixture
def display() -> Clocked:
    return Clocked(Console())


def start(display: Display, *flags: str, start_step: int = 0) -> None:
    display.on_start(run_info(parse_train(flags).config, Path("out"), start_step=start_step))


def test_time_left_goes_by_the_speed_so_far(display: Clocked) -> None:
    display.now_is = 100.0
    start(display, "--max_steps", "200")
    assert display.seconds_left is None
    display.on_step(50, {})
    display.now_is = 110.0
    assert display.seconds_left == pytest.approx(30.0)
    assert display.time_text() == "0:10 elapsed, 0:30 left"


def test_a_continued_run_counts_its_own_steps_only(display: Clocked) -> None:
    start(display, "--max_steps", "200", start_step=100)
    assert (display.step, display.seconds_left) == (100, None)
    display.now_is = 10.0
    display.on_step(150, {})
    assert display.seconds_left == pytest.approx(10.0)
    assert "continued after step 100" in display.heading()[-1]


def test_only_the_last_rows_are_kept(display: Clocked) -> None:
    start(display)
    config = parse_train([]).config
    for step in range(1, 51):
        display.on_step(step, metrics_at(step, config))
    assert [step for step, _ in display.rows] == list(range(51 - ROWS, 51))


def test_before_is_what_was_measured_before_the_first_step(display: Clocked) -> None:
    start(display)
    display.on_evaluation(0, BEFORE)
    display.on_evaluation(50, AFTER)
    assert (display.before, display.now, display.evaluated_at) == (BEFORE, AFTER, 50)


def test_the_heading_says_model_kl_reference_and_folder(display: Clocked) -> None:
    start(display, "--target_kl", "0.05")
    assert display.heading() == [
        "arithmetic · builtin, 863k parameters · cpu",
        "KL: k3, gradient reverse per token, in the loss",
        "reference: a frozen copy of the starting policy · "
        "beta: hold controller from 0.01, towards 0.05 nats per token",
        "folder: out",
    ]
    start(display, "--beta", "0")
    assert display.heading()[1:] == ["KL: none: beta is 0", "folder: out"]


class Log(io.StringIO):
    """A file that counts how often it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1
        super().flush()


def play(*flags: str, start_step: int = 0) -> Log:
    """The lines of a whole run."""
    log = Log()
    plain = LogLines(Console(file=log))
    config = parse_train(flags).config
    plain.on_start(run_info(config, Path("out"), start_step=start_step))
    if not start_step:
        plain.on_evaluation(0, BEFORE)
    for step in range(start_step + 1, config.run.max_steps + 1):
        plain.on_step(step, metrics_at(step, config))
    plain.on_evaluation(config.run.max_steps, AFTER)
    return log


def rows_of(log: Log) -> list[str]:
    return [line for line in log.getvalue().splitlines() if line.endswith("12.3k")]


@pytest.mark.parametrize(("steps", "lines"), [(5, 5), (20, 20), (200, 21), (205, 20), (10_000, 21)])
def test_about_twenty_lines_with_the_first_and_the_last_step(steps: int, lines: int) -> None:
    rows = rows_of(play("--max_steps", str(steps)))
    assert len(rows) == lines
    assert (rows[0].split()[0], rows[-1].split()[0]) == ("1", str(steps))


def test_a_continued_run_has_as_many_lines() -> None:
    rows = rows_of(play("--max_steps", "210", start_step=10))
    assert [row.split()[0] for row in rows[:3]] == ["11", "20", "30"]


def test_rows_stand_under_their_titles() -> None:
    log = play("--max_steps", "5", "--kl_clip_method", "hard")
    head = next(line for line in log.getvalue().splitlines() if line.strip().startswith("step  reward"))
    rows = rows_of(log)
    assert {len(row) for row in rows} == {len(head)}
    assert " ".join(rows[-1].split()) == "5 0.773 0.0005 0.0015 0.0015 25.0% 0.01 4.8 0.298 1.2% 0 12.3k"
    assert head.index("exact") + 5 == rows[-1].rindex("0.0015") + 6


def test_evaluations_are_lines_with_the_change() -> None:
    lines = play("--max_steps", "5").getvalue().splitlines()
    first, last = (line for line in lines if "evaluation after step" in line)
    assert "evaluation after step 0: addition 76.2, subtraction 90.2, reversal 100.0" in first
    assert "after step 5: addition 93.8 (+17.6), subtraction 89.5 (−0.8), reversal 99.6 (−0.4)" in last


def test_every_line_is_written_at_once() -> None:
    log = play("--max_steps", "200")
    assert log.flushed >= len(rows_of(log))


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    plain = LogLines(Console(file=Closed()))
    plain.on_start(run_info(parse_train([]).config, Path("out")))
    plain.on_step(1, {"reward": 1.0})
    assert plain.step == 1


def test_alarms_are_said_with_what_to_do_and_notes_are_not() -> None:
    log = Log()
    plain = LogLines(Console(file=log))
    plain.on_alarm(rise("kl-spike", 7))
    plain.on_alarm(rise("kl-high", 7))
    plain.on_alarm(rise("step-zero-kl", 7))  # the trainer says it as a caution
    first, second = log.getvalue().splitlines()
    assert first == "  alarm after step 7: kl-spike: the KL jumped (from .1 to .9)"
    assert second.startswith("    next step: Look at the tokens")
    assert plain.raised == {"kl-spike", "kl-high", "step-zero-kl"}


def live_after(steps: int, *flags: str, width: int = 100, height: int = 42) -> LiveTable:
    """A display that has seen so many steps; nothing is drawn yet."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    live = LiveTable(console)
    config = parse_train(flags).config
    super(LiveTable, live).on_start(run_info(config, Path("runs/arithmetic-001")))
    live.on_evaluation(0, BEFORE)
    for step in range(1, steps + 1):
        live.on_step(step, metrics_at(step, config))
    return live


def drawn(live: LiveTable) -> list[str]:
    """The picture, line by line."""
    console = Console(file=io.StringIO(), width=live.console.width, height=live.console.height, color_system=None)
    console.print(live.picture())
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return [line.rstrip() for line in text.splitlines()]


def line_with(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


def test_the_latest_step_is_marked_and_its_numbers_stand_under_their_titles() -> None:
    lines = drawn(live_after(30, "--max_steps", "60", "--kl_clip_method", "hard"))
    head, latest = line_with(lines, "step  reward"), line_with(lines, "▸30")
    titles = [head[i:].split("  ")[0] for i in range(len(head))]
    assert "KL k1" in titles
    assert " ".join(latest.split()) == "▸30 0.847 0.0059 0.0068 0.0069 25.0% 0.01 4.8 0.257 1.2% 1.5e-04 12.3k"
    assert head.split("  ")[-1].strip() == "tok/s"
    for title, value in (("reward", "0.847"), ("exact", "0.0069"), ("over", "25.0%"), ("tok/s", "12.3k")):
        assert head.index(title) + len(title) == latest.index(value) + len(value)


def test_the_last_twelve_steps_are_rows() -> None:
    lines = drawn(live_after(30))
    firsts = [line.split()[0].lstrip("▸") for line in lines if "12.3k" in line]
    assert firsts == [str(step) for step in range(19, 31)]


def test_progress_shows_step_share_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_after(30, "--max_steps", "60")
    monkeypatch.setattr(live, "clock", lambda: live.started + 9.0)
    line = line_with(drawn(live), "step 30/60")
    assert "━" in line
    assert line.endswith("50%  0:09 elapsed, 0:09 left")


def test_skills_before_and_now() -> None:
    live = live_after(10)
    live.on_evaluation(10, AFTER)
    lines = drawn(live)
    assert line_with(lines, "skill").split() == ["skill", "(held", "out)", "before", "step", "10", "change"]
    assert line_with(lines, "addition").split() == ["addition", "76.2", "93.8", "+17.6"]
    assert line_with(lines, "reversal").split() == ["reversal", "100.0", "99.6", "−0.4"]


def test_warnings_stand_beneath_once_and_the_last_three_of_them() -> None:
    live = live_after(2)
    for text in ("one", "two", "three", "four", "four"):
        live.on_warning(text)
    assert drawn(live)[-3:] == ["! two", "! three", "! four"]


def test_alarms_stand_first_and_in_red() -> None:
    live = live_after(2)
    for text in ("one", "two", "three"):
        live.on_warning(text)
    live.on_alarm(rise("kl-high", 2))
    live.on_alarm(rise("kl-spike", 2))
    assert drawn(live)[-3:] == ["! alarm after step 2: kl-spike: the KL jumped (from .1 to .9)", "! two", "! three"]
    assert live._shown_lines()[0][1] == "red"
    for name in ("truncated", "retention", "dilution"):
        live.on_alarm(rise(name, 2))
    shown = drawn(live)
    assert [line.split(": ")[1] for line in shown if line.startswith("! alarm")] == [
        "truncated",
        "retention",
        "dilution",
    ]
    assert not any(line.startswith("! t") for line in shown)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("height", [24, 30, 60])
@pytest.mark.parametrize("warned", [False, True])
def test_the_picture_is_never_larger_than_the_terminal(width: int, height: int, warned: bool) -> None:
    live = live_after(30, "--kl_clip_method", "hard", "--target_kl", "0.05", width=width, height=height)
    if warned:
        live.on_warning("a long warning " * 14)
        live.on_alarm(rise("detached-reference", 30))
    lines = drawn(live)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert any("▸30" in line for line in lines)


def test_loading_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    live = LiveTable(console)
    try:
        live.on_loading("teaching the built-in base model", 350, 700, 0.5)
        (line,) = drawn(live)
    finally:
        live.close()
    assert line.startswith("teaching the built-in base model, once  ━")
    assert line.endswith("350/700, loss 0.500")


def test_the_end_stops_drawing_and_leaves_the_skills_to_the_summary() -> None:
    live = live_after(5, "--max_steps", "5")
    live.live.start()
    live.on_end(summary_of(parse_train([]).config, Path("out"), steps=5))
    live.close()
    assert not live.live.is_started
    assert not any(line.startswith("skill") for line in drawn(live))
    shown = live.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "▸5" in shown


def test_the_trained_skill_comes_first_and_a_missing_score_is_a_dash() -> None:
    rows = skill_rows({"b": 0.5}, {"b": 0.25, "a": 1.0}, "a")
    assert rows == [("a (trained)", "–", "100.0", "–"), ("b", "50.0", "25.0", "−25.0")]


@pytest.mark.parametrize(
    ("total", "due"), [(3, [1, 2, 3]), (700, [1, 140, 280, 420, 560, 700]), (7, [1, 2, 3, 4, 5, 6, 7])]
)
def test_a_log_hears_of_it_at_its_start_and_end_and_some_times_between(total: int, due: list[int]) -> None:
    assert [done for done in range(1, total + 1) if Loading("x", done, total, None).is_due] == due
