"""Where there is no terminal: about twenty aligned lines, each written at once."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info

from klamp.cli.arguments import parse_train
from klamp.cli.display import LogLines


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


def test_no_colour_no_control_characters() -> None:
    assert "\x1b" not in play("--max_steps", "5").getvalue()


def test_what_is_not_measured_is_a_dash() -> None:
    assert rows_of(play("--max_steps", "5", "--beta", "0"))[0].split()[2:5] == ["-", "-", "-"]


def test_evaluations_are_lines_with_the_change() -> None:
    lines = play("--max_steps", "5").getvalue().splitlines()
    first, last = (line for line in lines if "evaluation after step" in line)
    assert "evaluation after step 0: addition 76.2, subtraction 90.2, reversal 100.0" in first
    assert "after step 5: addition 93.8 (+17.6), subtraction 89.5 (-0.8), reversal 99.6 (-0.4)" in last


def test_every_line_is_written_at_once() -> None:
    log = play("--max_steps", "200")
    assert log.flushed >= len(rows_of(log))


def test_loading_is_a_few_lines_and_warnings_are_told_once() -> None:
    log = Log()
    plain = LogLines(Console(file=log))
    for done in range(1, 701):
        plain.on_loading("teaching", done, 700, 0.5)
    assert [line.split()[1] for line in log.getvalue().splitlines()] == [
        f"{done}/700," for done in (1, 140, 280, 420, 560, 700)
    ]
    plain.on_warning("look out")
    plain.on_warning("look out")
    assert log.getvalue().count("caution: look out") == 1


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
