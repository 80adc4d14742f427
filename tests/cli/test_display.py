"""The progress of a run, and of the runs of an ablation: in a log and on a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info

from klamp.cli.arguments import parse_train
from klamp.cli.display import LEGEND, ROWS, Display, Drawn, skill_rows


class Log(io.StringIO):
    """A file that counts how often it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1
        super().flush()


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def console(*, terminal: bool, width: int = 110, height: int = 42) -> Console:
    return Console(file=Log(), force_terminal=terminal, width=width, height=height, color_system=None)


def text_of(display: Drawn) -> str:
    return display.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def play(*flags: str, start_step: int = 0, steps: int | None = None, on: Console | None = None) -> Display:
    """A display that has followed a run, or its first steps."""
    display, config = Display(on or console(terminal=False)), parse_train(flags)[0]
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
    shown = console(terminal=False, width=display.console.width)
    shown.print(display.picture())
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]  # pyright: ignore


@pytest.mark.parametrize(("steps", "lines"), [(5, 5), (20, 20), (205, 20), (10_000, 21)])
def test_about_twenty_lines_with_the_first_and_the_last_step_written_at_once(steps: int, lines: int) -> None:
    display = play("--max_steps", str(steps))
    rows = rows_of(display)
    assert len(rows) == lines
    assert rows[0].startswith(f"step 1/{steps}: reward 0.") and rows[-1].startswith(f"step {steps}/{steps}: ")
    assert "KL k3 0." in rows[-1] and LEGEND in text_of(display)
    assert display.console.file.flushed >= lines  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("terminal", [False, True])
def test_news_are_lines(terminal: bool) -> None:
    display = play("--max_steps", "5", on=console(terminal=terminal))
    for text in ("one", "two"):
        display.on_warning(text)
    display.on_alarm(rise("kl-spike", 7))
    display.on_alarm(rise("kl-high", 7))  # a note
    display.close()
    text = text_of(display)
    assert "  evaluation after step 0: addition 76.2, subtraction 90.2, reversal 100.0\n" in text
    assert "after step 5: addition 93.8 (+17.6), subtraction 89.5 (−0.8), reversal 99.6 (−0.4)" in text
    assert (text.count("  caution: one\n"), text.count("  caution: two\n")) == (1, 1)
    assert text.count("alarm after") == 1 and "kl-spike" in text and "next step: " in text
    assert display.raised == {"kl-spike", "kl-high"}


def test_a_terminal_has_the_last_steps_and_a_bar() -> None:
    display = play("--max_steps", "60", "--kl_clip_method", "hard", steps=30, on=console(terminal=True))
    lines = drawn(display)
    display.close()
    assert "━" in lines[0] and lines[0].startswith("step") and "30/60" in lines[0] and "left" in lines[0]
    assert " ".join(lines[1].split()) == "step reward KL exact KL k3 KL k1 over beta length entropy clip lr tok/s"
    assert " ".join(lines[-1].split()) == (
        "30 0.847 0.006859 0.006806 0.005912 0.25 0.01 4.8 0.2572 0.0123 0.00015 12,345"
    )
    assert [line.split()[0] for line in lines[2:]] == [str(step) for step in range(31 - ROWS, 31)]
    assert "30 0.847" in " ".join(text_of(display).split()), "it stays on the screen"


@pytest.mark.parametrize(("width", "height"), [(60, 10), (80, 24)])
def test_the_picture_is_never_larger_than_the_terminal(width: int, height: int) -> None:
    on = console(terminal=True, width=width, height=height)
    display = play("--kl_clip_method", "hard", "--target_kl", "0.05", steps=30, on=on)
    display.close()
    lines = drawn(display)
    assert max(map(len, lines)) <= width and len(lines) < height


def test_a_reader_that_leaves_ends_nothing() -> None:
    assert rows_of(play("--max_steps", "1")) and play("--max_steps", "1", on=Console(file=Gone())).rows


def test_the_trained_skill_comes_first_and_a_missing_score_is_a_dash() -> None:
    rows = skill_rows({"b": 0.5}, {"b": 0.25, "a": 1.0}, "a")
    assert rows == [("a (trained)", "–", "100.0", "–"), ("b", "50.0", "25.0", "−25.0")]


@pytest.mark.parametrize(("total", "due"), [(3, [1, 2, 3]), (700, [1, 140, 280, 420, 560, 700])])
def test_slow_work_before_the_run_has_some_lines_in_a_log_and_a_bar_on_a_terminal(total: int, due: list[int]) -> None:
    log, live = Drawn(console(terminal=False)), Drawn(console(terminal=True))
    for done in range(1, total + 1):
        log.on_loading("x", done, total, 0.5)
    live.on_loading("x", 2, total, 0.5)
    live.close()
    assert text_of(log).splitlines() == [f"x: {done}/{total}, loss 0.500" for done in due]
    assert "x, once" in text_of(live) and f"2/{total}" in text_of(live)
