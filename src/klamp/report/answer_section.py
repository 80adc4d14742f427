"""The section of answers: the same held-out questions before and after training, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from klamp.diagnostics.history import Answer
from klamp.report.figure import plain_table
from klamp.report.markup import Html, element, join, shorten
from klamp.report.numerals import MISSING, short
from klamp.report.run import ReportRun

LONGEST = 400
"""Characters of an answer that are shown."""
MOST = 40
"""Questions that are shown."""


def answer_section(runs: Sequence[ReportRun]) -> Html:
    """What the policy answered at the first and at the last evaluation.

    Args:
        runs: those of the report; what the first of them answered before training stands for all.
    """
    first = next((run for run in runs if run.history.answers), None)
    if first is None:
        return element("p", "No answers of an evaluation were written.", class_="missing")
    before = _answers(first, min(answer.step for answer in first.history.answers))
    after = [_answers(run, max((a.step for a in run.history.answers), default=-1)) for run in runs]
    rows = [
        (
            _question(skill, question),
            _cell(before[skill, question]),
            *(_cell(found.get((skill, question))) for found in after),
        )
        for skill, question in list(before)[:MOST]
    ]
    headings = ("question", "before", *(run.name if len(runs) > 1 else "after" for run in runs))
    text = "Greedy answers to held-out prompts, with their scores; before training, and after the last evaluation."
    table = plain_table(headings, rows, caption="answers before and after training", classes="answers")
    return join([element("p", text, class_="aside"), table])


def _answers(run: ReportRun, step: int) -> dict[tuple[str, str], Answer]:
    return {(answer.skill, answer.question): answer for answer in run.history.answers if answer.step == step}


def _question(skill: str, question: str) -> Html:
    return join([shorten(question, LONGEST), element("small", skill)])


def _cell(answer: Answer | None) -> Html:
    if answer is None:
        return Html(MISSING)
    text = shorten(answer.completion.strip(), LONGEST) or "(nothing)"
    return join([element("q", text), element("small", f"score {short(answer.score)}")])
