"""Length once the reward has saturated: by hand from metrics that are written down here, and from folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from klamp.ablation.plan import Arm, Plan, Run, run_folder, runs
from studies.saturation import Course, course_of, draw, markdown, read_courses, write_saturation


def rows_of(rewards: list[float], lengths: list[float], **more: float) -> list[dict[str, Any]]:
    pairs = zip(rewards, lengths, strict=True)
    return [{"step": i, "reward": r, "length/mean": n, **more} for i, (r, n) in enumerate(pairs, start=1)]


def written(step: int, *texts: str) -> list[dict[str, Any]]:
    return [{"step": step, "completion": text} for text in texts]


RISING = rows_of(
    [0.5] * 10 + [1.0] * 20,
    [6.0] * 10 + [8.0] * 10 + [11.0] * 10,
    **{"kl/exact": 0.05, "kl/exact_sequence": 0.5},
)
"""Nine steps of reward 1 make the mean of ten .95; the tenth goes over it."""


def test_the_numbers_of_a_course() -> None:
    course = course_of("a", RISING, [*written(30, "==132", "7"), *written(21, "=1=2=3"), *written(20, "=" * 9)])
    assert course.numbers == pytest.approx(
        {
            "saturated": 19.0,
            "length/saturated": (6 + 9 * 8) / 10,
            "length/end": 11.0,
            "length/growth": 11 - 7.8,
            "reward/end": 1.0,
            "kl/token": 0.05,
            "kl/sequence": 0.5,
            "fillers/end": 5 / 3,
        }
    )
    assert course.steps == list(range(1, 31))


@pytest.mark.parametrize(
    ("rewards", "saturated"),
    [([0.9] * 40, None), ([1.0] * 12 + [0.2] * 10, 10.0), ([1.0] * 4, None)],
    ids=["never gets there", "falls again", "shorter than the window"],
)
def test_where_a_reward_saturates(rewards: list[float], saturated: float | None) -> None:
    numbers = course_of("a", rows_of(rewards, [5.0] * len(rewards)), []).numbers
    assert numbers.get("saturated") == saturated and numbers["length/end"] == 5.0
    assert saturated or "length/growth" not in numbers


def test_the_table_has_a_row_per_arm_with_its_interval() -> None:
    courses = [
        Course(arm="no KL", steps=[1], lengths=[6.0], numbers={"length/end": 6.0}),
        Course(arm="loss", steps=[1], lengths=[7.0], numbers={"length/end": 7.0, "length/growth": 1.0}),
        Course(arm="loss", steps=[1], lengths=[8.0], numbers={"length/end": 8.0}),
    ]
    lines = markdown(courses).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| arm", "| ---", "| no KL", "| loss"]
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == ["loss", "2", "-", "-", "7.5 [1.147, 13.85]", "1 (1 of 2)", "-", "-", "-", "-", "-"]
    assert "| end, against no KL |" in lines[0]
    assert "| - | - | 6 | - |" in lines[2]


@pytest.fixture
def swept(tmp_path: Path) -> tuple[Run, ...]:
    """The runs of two arms and two seeds, three of which wrote something; and one more arm."""
    arms = (Arm(name="no KL", values={"beta": 0.0}), Arm(name="loss"), Arm(name="other", values={"beta": 0.2}))
    every = runs(Plan(arms=arms, seeds=(0, 1)))
    for run in every:
        if (run.arm.name, run.seed) == ("loss", 1):
            continue
        folder = run_folder(tmp_path, run)
        folder.mkdir(parents=True)
        lines = [{"step": 0, "eval/addition": 0.5}, *RISING, {"step": 30, "eval/addition": 0.9}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written(30, "===9")))
    return every


def test_courses_are_read_from_the_folders(swept: tuple[Run, ...], tmp_path: Path) -> None:
    courses = read_courses(swept, tmp_path)
    assert sorted(course.arm for course in courses) == ["loss", "no KL", "no KL", "other", "other"]
    assert {course.numbers["fillers/end"] for course in courses} == {3.0}
    assert {len(course.steps) for course in courses} == {30}, "evaluations are no steps"


def test_ends_are_held_against_the_first_arm_with_the_same_seed(swept: tuple[Run, ...], tmp_path: Path) -> None:
    (longer,) = (run for run in swept if run.arm.name == "no KL" and run.seed == 1)
    file = run_folder(tmp_path, longer) / "metrics.jsonl"
    file.write_text("".join(json.dumps(row | {"length/mean": 13.0}) + "\n" for row in RISING))
    found = {(c.arm, c.seed): c.numbers.get("length/against") for c in read_courses(swept, tmp_path)}
    assert found == {
        ("no KL", 0): None,
        ("no KL", 1): None,
        ("loss", 0): 0.0,
        ("other", 0): 0.0,
        ("other", 1): -2.0,
    }
    assert [arm for arm, _ in found] == ["no KL", "no KL", "loss", "other", "other"], "arm by arm"


def test_table_and_picture_are_written_into_the_folder(swept: tuple[Run, ...], tmp_path: Path) -> None:
    files = write_saturation(swept, tmp_path)
    assert [file.name for file in files] == ["saturation.md", "saturation.png"]
    text = files[0].read_text()
    assert "| no KL | 2 |" in text and "| loss | 1 |" in text and "| other | 2 |" in text
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_where_no_run_has_taken_a_step(swept: tuple[Run, ...], tmp_path: Path) -> None:
    assert write_saturation(swept, tmp_path / "empty") == ()
    assert not list(tmp_path.glob("saturation.*"))


def test_the_picture_has_a_panel_per_arm_and_marks_where_the_reward_saturated() -> None:
    short = course_of("short", rows_of([0.5] * 3, [4.0] * 3), [])
    courses = [course_of("no KL", RISING, []), course_of("loss, hard", RISING, []), short]
    panels = [panel for panel in draw(courses).axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["no KL", "loss, hard", "short"]
    marked = [[_x(line)[0] for line in panel.lines if line.get_marker() == "v"] for panel in panels]
    assert marked == [[19.0], [19.0], []]
    curve: Any = panels[0].lines[-1]
    assert _x(curve)[0] == 10 and list(curve.get_ydata())[-1] == 11.0


def _x(line: Any) -> list[float]:
    return list(line.get_xdata())
