"""Answers before and after: one row per question, one column per run, texts of models escaped."""

from dataclasses import replace

from tests.report.pages import Node, parse, run_of

from klamp.doctor.history import Answer, Row
from klamp.report.headlines import headlines
from klamp.report.page import LONGEST, answer_section
from klamp.report.run import ReportRun, ScoreFormat

TAG = "<script>alert(1)</script>"


def answer(
    step: int, completion: str, *, question: str = "1+1=", skill: str = "addition", score: float = 0.0
) -> Answer:
    return Answer(step=step, skill=skill, question=question, completion=completion, score=score)


def run_with(name: str, *answers: Answer) -> ReportRun:
    run = run_of(name=name, k3=[0.0, 0.1])
    run.history.answers.extend(answers)
    return run


def section(*runs: ReportRun) -> Node:
    return parse(answer_section(runs))


def test_a_question_stands_beside_what_was_answered_first_and_last() -> None:
    made = section(
        run_with(
            "a",
            answer(0, "3"),
            answer(0, "dcba", question="rev abcd=", skill="reversal", score=1.0),
            answer(5, "4"),
            answer(9, "2", score=1.0),
            answer(9, "dcb", question="rev abcd=", skill="reversal"),
        )
    )
    assert made.one("table").rows() == [
        ["question", "after step 0", "after step 9"],
        ["1+1=addition", "3score 0.0", "2score 100.0"],
        ["rev abcd=reversal", "dcbascore 100.0", "dcbscore 0.0"],
    ]


def test_a_run_that_was_evaluated_once_has_answered_nothing_after_that() -> None:
    made = section(run_with("a", answer(0, "3")))
    assert made.one("table").rows() == [["question", "after step 0", "after"], ["1+1=addition", "3score 0.0", "–"]]
    late = section(run_with("a", answer(20, "3"), answer(40, "2")))
    assert late.one("table").rows()[0] == ["question", "after step 20", "after step 40"]


def test_several_runs_stand_side_by_side_after_what_the_first_answered_before() -> None:
    made = section(
        run_with("none"),
        run_with("a", answer(0, "3"), answer(9, "2")),
        run_with("b", answer(0, "3"), answer(7, "5"), answer(7, "x", question="another")),
    )
    assert made.one("table").rows() == [
        ["question", "after step 0, a", "none", "a", "b"],
        ["1+1=addition", "3score 0.0", "–", "2score 0.0", "5score 0.0"],
    ]


def test_what_the_teacher_answers_is_a_column_more_and_text() -> None:
    taught = [answer(0, "3"), answer(9, "4"), replace(answer(9, TAG, score=1.0), who="teacher")]
    made = section(run_with("a", *taught))
    assert made.one("table").rows() == [
        ["question", "after step 0", "after step 9", "teacher"],
        ["1+1=addition", "3score 0.0", "4score 0.0", f"{TAG}score 100.0"],
    ]
    assert not made.all("script") and "The teacher's are its own" in made.text
    runs = [run_with(n, *taught) for n in "ab"] + [run_with("c", replace(taught[2], completion="2"))]
    columns = ["question", "after step 0, a", "a", "b", "c", "teacher of a", "teacher of c"]
    assert section(*runs).one("table").rows()[0] == columns, "a and b have one"


def test_a_teacher_at_a_url_has_no_column_and_that_is_said() -> None:
    run = run_with("a", answer(0, "3"), answer(9, "4"))
    without = section(run)
    run.history.config = {"teacher_url": "http://host:8000"}
    made = section(run)
    columns = ["question", "after step 0", "after step 9"]
    assert made.one("table").rows()[0] == columns == without.one("table").rows()[0]
    assert "A teacher at a URL only scores" in made.text and "teacher" not in without.text


def test_scores_are_written_as_in_the_overview() -> None:
    run = run_with("a", answer(0, "3", score=0.996), answer(9, "2", score=1.0))
    run.history.evaluations += [Row(step=0, metrics={"addition": 0.996}), Row(step=9, metrics={"addition": 1.0})]
    tile, *_ = headlines(run, ["addition"], ScoreFormat.of([run]))
    made = section(run)
    assert made.one("table").rows()[1] == ["1+1=addition", "3score 99.6", f"2score {tile.value}"]
    assert f"with their scores ({tile.unit})." in made.text
    run.history.evaluations += [Row(step=10, metrics={"addition": 2.5})]
    made = section(run)
    assert made.one("table").rows()[1] == ["1+1=addition", "3score 0.996", "2score 1"], "they do not lie in 0 to 1"
    assert "with their scores." in made.text


def test_what_a_model_wrote_is_text_and_not_too_long_and_without_answers_it_says_so() -> None:
    made = section(run_with("a", answer(0, TAG + "y" * 1000, question=TAG), answer(1, " ", question=TAG)))
    assert not made.all("script") and TAG in made.text
    assert f"{TAG}{'y' * (LONGEST - len(TAG))}…" in made.text
    assert "(nothing)" in made.text
    assert section(run_with("a")).text == "No answers of an evaluation were written."
    assert "ReportCallback(answers=4)" in section(run_of(source="TRL trainer state")).text
