"""The table of answers: one row per question, one column per arm, texts of models escaped."""

from __future__ import annotations

import json
from pathlib import Path

from klamp.ablation.execute import ANSWERS_MARKDOWN, LONGEST_ANSWER, answers_markdown, write_answers
from klamp.ablation.plan import Plan, grid, run_folder, runs
from klamp.diagnostics.history import Answer
from klamp.training.folders import ANSWERS


def answer(*given: object, **more: str) -> Answer:
    return Answer(**row(*given, **more))  # pyright: ignore


def row(step: int, completion: str, *, question: str = "1+1=", skill: str = "addition") -> dict[str, object]:
    return {"step": step, "skill": skill, "question": question, "completion": completion, "score": 1.0}


def test_a_question_stands_beside_what_each_arm_answered_last() -> None:
    table = answers_markdown(
        {
            "free": [
                answer(0, "3"),
                answer(0, "x", question="2+2="),
                answer(5, "4"),
                answer(9, "2"),
                answer(9, "y", question="2+2="),
            ],
            "held": [answer(0, "3"), answer(4, "3")],
            "not begun": [],
        },
        seed=7,
    )
    assert table.splitlines() == [
        "Greedy answers to held-out questions, seed 7.",
        "",
        "| question | before | free | held |",
        "| --- | --- | --- | --- |",
        "| 1+1= (addition) | 3 | 2 | 3 |",
        "| 2+2= (addition) | x | y |  |",
    ]


def test_what_a_model_wrote_cannot_leave_its_cell() -> None:
    table = answers_markdown({"a": [answer(0, "one | two\n\n# three"), answer(1, "<b>*loud*</b>")]}, seed=0)
    last = table.splitlines()[-1]
    assert last == "| 1+1= (addition) | one \\| two # three | &lt;b>\\*loud\\*&lt;/b> |"


def test_a_long_answer_is_cut_and_says_so() -> None:
    cell = answers_markdown({"a": [answer(0, "a" * (LONGEST_ANSWER + 1))]}, seed=0).splitlines()[-1].split(" | ")[1]
    assert cell == "a" * (LONGEST_ANSWER - 1) + "…"


def test_the_file_holds_the_runs_of_the_first_seed(tmp_path: Path) -> None:
    every = runs(Plan(base={"max_steps": 1}, arms=grid({"beta": [0.0, 0.1]}), seeds=(3, 4)))
    assert write_answers(every, tmp_path) == ()
    for run in every:
        folder = run_folder(tmp_path, run)
        folder.mkdir(parents=True)
        (folder / ANSWERS).write_text(json.dumps(row(0, run.name)) + "\n", encoding="utf-8")
    assert write_answers(every, tmp_path) == (tmp_path / ANSWERS_MARKDOWN,)
    text = (tmp_path / ANSWERS_MARKDOWN).read_text(encoding="utf-8")
    assert "seed 3" in text and "beta-0.1_seed-3" in text and "seed-4" not in text
