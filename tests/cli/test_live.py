"""The picture on a terminal, drawn into a string."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info, summary_of

from klamp.cli.arguments import parse_train
from klamp.cli.columns import ScoreScale
from klamp.cli.display import LiveTable, skills_table


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


def test_what_is_not_measured_is_a_dash() -> None:
    row = line_with(drawn(live_after(3, "--beta", "0")), "▸3")
    assert row.split()[:6] == ["▸3", "0.765", "-", "-", "-", "0"]


def test_skills_before_and_now() -> None:
    live = live_after(10)
    live.on_evaluation(10, AFTER)
    lines = drawn(live)
    assert line_with(lines, "skill").split() == ["skill", "(held", "out)", "before", "step", "10", "points"]
    assert line_with(lines, "addition").split() == ["addition", "76.2", "93.8", "+17.6"]
    assert line_with(lines, "reversal").split() == ["reversal", "100.0", "99.6", "-0.4"]


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


def test_curves_go_from_first_to_last() -> None:
    lines = drawn(live_after(40))
    assert line_with(lines, "reward   ▁").endswith("█  0.7564 → 0.8658")
    assert line_with(lines, "KL exact ▁").endswith("█  0.000321 → 0.008218")


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
    table = skills_table({"b": 0.5}, {"b": 0.25, "a": 1.0}, scale=ScoreScale(True), after_title="after", trained="a")
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    rows = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert [row.split() for row in rows[1:]] == [["a", "(trained)", "-", "100.0", "-"], ["b", "50.0", "25.0", "-25.0"]]
