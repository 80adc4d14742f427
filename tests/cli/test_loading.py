"""Slow work before a run: in words, a few times in a log, as a bar."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from klamp.cli.display import Loading, bar


@pytest.mark.parametrize(("loss", "text"), [(0.5, "3/8, loss 0.500"), (None, "3/8")])
def test_the_loss_is_said_where_there_is_one(loss: float | None, text: str) -> None:
    assert Loading("teaching", 3, 8, loss).text == text


@pytest.mark.parametrize(
    ("total", "due"), [(3, [1, 2, 3]), (700, [1, 140, 280, 420, 560, 700]), (7, [1, 2, 3, 4, 5, 6, 7])]
)
def test_a_log_hears_of_it_at_its_start_and_end_and_some_times_between(total: int, due: list[int]) -> None:
    assert [done for done in range(1, total + 1) if Loading("x", done, total, None).is_due] == due


def test_a_bar_has_its_title_left_and_its_text_right() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as shown:
        console.print(bar("teaching, once", 4, 8, "4/8"))
    line = shown.get().rstrip()
    assert line.startswith("teaching, once  ━") and line.endswith("4/8")
