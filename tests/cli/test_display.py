"""What the displays know: steps, time left, evaluations before and now."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, run_info

from klamp.cli.arguments import parse_train
from klamp.cli.display import ROWS, Display


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


def test_only_the_last_rows_are_kept_and_the_course_of_all(display: Clocked) -> None:
    start(display)
    config = parse_train([]).config
    for step in range(1, 51):
        display.on_step(step, metrics_at(step, config))
    assert [step for step, _ in display.rows] == list(range(51 - ROWS, 51))
    assert len(display.course["reward"]) == 50
    assert [name for name, _ in display.curves()] == ["reward", "KL exact"]


def test_without_an_exact_kl_the_curve_is_k3(display: Clocked) -> None:
    start(display)
    display.on_step(1, {"reward": 1.0, "kl/k3": 0.5})
    assert display.curves() == [("reward", [1.0]), ("KL k3", [0.5])]


def test_before_is_what_was_measured_before_the_first_step(display: Clocked) -> None:
    start(display)
    display.on_evaluation(0, BEFORE)
    display.on_evaluation(50, AFTER)
    assert (display.before, display.now, display.evaluated_at) == (BEFORE, AFTER, 50)


def test_a_continued_run_has_no_before_of_its_own(display: Clocked) -> None:
    start(display, start_step=100)
    display.on_evaluation(150, AFTER)
    assert (display.before, display.now) == ({}, AFTER)


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
