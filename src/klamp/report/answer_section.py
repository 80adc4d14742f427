"""The section of answers: the same held-out questions before and after training, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from klamp.diagnostics.history import Answer, answers_of
from klamp.report.run import ReportRun, ScoreFormat
from klamp.report.text import MISSING, Html, element, join, plain_table, shorten

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
    scores = ScoreFormat.of(runs)
    before = answers_of(first.history.answers, "first")
    after = [answers_of(run.history.answers, "last") for run in runs]
    rows = [
        (
            _question(skill, question),
            _cell(before[skill, question], scores),
            *(_cell(found.get((skill, question)), scores) for found in after),
        )
        for skill, question in list(before)[:MOST]
    ]
    headings = ("question", "before", *(run.name if len(runs) > 1 else "after" for run in runs))
    unit = f" ({scores.unit})" if scores.points else ""
    text = f"Greedy answers to held-out prompts, with their scores{unit}; before training, and at the last evaluation."
    table = plain_table(headings, rows, caption="answers before and after training", classes="answers")
    return join([element("p", text, class_="aside"), table])


def _question(skill: str, question: str) -> Html:
    return join([shorten(question, LONGEST), element("small", skill)])


def _cell(answer: Answer | None, scores: ScoreFormat) -> Html:
    if answer is None:
        return Html(MISSING)
    text = shorten(answer.completion.strip(), LONGEST) or "(nothing)"
    return join([element("q", text), element("small", f"score {scores.write(answer.score)}")])
