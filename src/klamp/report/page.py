"""The whole page: its sections in order, with styles and script inside; it loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from klamp._version import __version__
from klamp.doctor.history import Answer, Question, answers_of
from klamp.errors import DataError
from klamp.report.alarm_section import alarm_section, anchors, numbered, verdict
from klamp.report.charts import charts, render_chart
from klamp.report.headlines import COLUMNS, WINDOW, result, side_by_side, tiles
from klamp.report.run import ReportRun, ScoreFormat
from klamp.report.text import MISSING, Html, count, element, join, plain_table, setting, shorten
from klamp.report.tokens import Shown, fitting, ranked, token_section

LIMIT = 2_000_000
"""The largest size of a page, in bytes."""
POINTS = 40_000
"""About how many points all curves of a page have together."""
GENERATOR = "klamp report"
LONGEST = 400
"""Characters of an answer, or of a value of a setting, that are shown."""
MOST = 20
STYLES, SCRIPTS = (("page.css", "charts.css", "tokens.css"), ("theme.js", "plot.js", "charts.js", "tokens.js"))


def render(runs: Sequence[ReportRun], *, limit: int = LIMIT) -> str:
    """One HTML document that shows these runs and loads nothing.

    Args:
        runs: one, or several to compare.
        limit: bytes of the document, at most.

    Raises:
        DataError: so many runs that their curves alone are larger.
    """
    completions = ranked(runs)
    for most in (400, 200, 100, 50, 25):
        size = len(_document(runs, completions, {}, most=most).encode())
        room = limit - size
        while room > 0:
            page = _document(runs, completions, fitting(runs, completions, room=room), most=most)
            excess = len(page.encode()) - limit
            if excess <= 0:
                return page
            room -= excess
    raise DataError(
        "the report would be too large",
        got=f"{len(runs)} runs, {size} bytes without any completion",
        why=f"a page stays below {limit} bytes",
        fix="name fewer runs",
    )


def _document(runs: Sequence[ReportRun], completions: Sequence[Shown], cards: Mapping[int, Html], *, most: int) -> str:
    style, script = _asset(STYLES), _asset(SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{_name(runs)} · klamp report"),
        element("style", Html(style)),
    )
    body = element("body", *_body(runs, completions, cards, most=most), element("script", Html(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _body(
    runs: Sequence[ReportRun], completions: Sequence[Shown], cards: Mapping[int, Html], *, most: int
) -> list[Html]:
    sections = {
        "overview": ("Overview", _overview(runs)),
        "alarms": ("Alarms", alarm_section(runs, anchors(completions, cards))),
        "curves": ("Over steps", _curves(runs, most)),
        "answers": ("Before and after", answer_section(runs)),
        "tokens": ("Token by token", token_section(runs, completions, cards)),
        "configuration": ("Configuration", settings_section(runs)),
    }
    parts = [
        element("section", element("h2", t, id=f"{n}-heading"), body, id=n, aria_labelledby=f"{n}-heading")
        for n, (t, body) in sections.items()
    ]
    links = [element("a", title, href=f"#{name}") for name, (title, _) in sections.items()]
    return [
        element("a", "To the content", href="#content", class_="skip"),
        element(
            "header",
            element("span", "klamp report", class_="brand"),
            element("nav", *links, aria_label="Sections"),
            element("button", "Dark", type="button", id="theme", hidden=True),
            class_="bar",
        ),
        element("main", _title(runs), *parts, id="content"),
        element("footer", element("p", f"Made by klamp {__version__}. This file loads nothing from anywhere.")),
    ]


def _name(runs: Sequence[ReportRun]) -> str:
    return runs[0].name if len(runs) == 1 else f"{count(len(runs), 'run')} compared"


def _title(runs: Sequence[ReportRun]) -> Html:
    if len(runs) > 1:
        source = ", ".join(sorted({run.history.source for run in runs}))
    else:
        history = runs[0].history
        source = f"{history.source}, {count(len(history.rows), 'logged step')}"
        source += f" up to step {history.rows[-1].step}" if history.rows else ""
    paths = element("p", *([element("code", runs[0].path), " · "] if len(runs) == 1 else []), source, class_="source")
    lines = {"lead": result(runs[0]), "source": " · ".join(runs[0].said)} if len(runs) == 1 else {}
    words = [element("p", text, class_=name) for name, text in lines.items() if text]
    return element("div", element("h1", _name(runs)), *words, paths, verdict(runs), class_="title")


def _overview(runs: Sequence[ReportRun]) -> Html:
    if len(runs) == 1:
        return tiles(runs[0])
    headings, rows = side_by_side(runs)
    text = (
        f"Means of the last {WINDOW} logged values (of the last half, where there are fewer than {2 * WINDOW}), what "
        "is not finite left out; scores of the last evaluation."
    )
    if any("kl/reverse" in run.outcome for run in runs):
        text += (
            " KL from the start: exact, against the model that training started from, measured after training on "
            "completions to held-out prompts, in the runs that have an outcome.json."
        )
    look = "headlines few" if len(runs) <= COLUMNS else "headlines"
    table = plain_table(headings, rows, caption="headline numbers of each run", classes=look)
    return join([element("p", text, class_="aside"), table])


def _curves(runs: Sequence[ReportRun], most: int) -> Html:
    page_charts = charts(runs, numbered(runs))
    if not page_charts:
        return element("p", "No metric over steps was logged.", class_="missing")
    curves = sum(len(chart.series) for chart in page_charts)
    points = max(25, min(most, POINTS // max(1, curves)))
    return element("div", *(render_chart(chart, most=points) for chart in page_charts), class_="grid")


def answer_section(runs: Sequence[ReportRun]) -> Html:
    """What the policy answered at the first and at the last evaluation, and what its teacher answers."""
    first = next((run for run in runs if run.history.answers), None)
    if first is None:
        way = " klamp.trl.ReportCallback(answers=4) writes some." if runs[0].history.source.startswith("TRL") else ""
        return element("p", f"No answers of an evaluation were written.{way}", class_="missing")
    scores = ScoreFormat.of(runs)
    before = answers_of(first.history.answers, "first")
    after = [_later(run) for run in runs]
    teachers = _teachers(runs)
    rows = [
        (
            join([shorten(question, LONGEST), element("small", skill)]),
            _cell(before[skill, question], scores),
            *(_cell(answers.get((skill, question)), scores) for answers in (*after, *teachers.values())),
        )
        for skill, question in list(before)[:MOST]
    ]
    began = next(iter(before.values())).step if before else 0
    ended = f"after step {max(answer.step for answer in after[0].values())}" if after[0] else "after"
    heading = f"after step {began}" + (f", {first.name}" if len(runs) > 1 else "")
    headings = ("question", heading, *(run.name if len(runs) > 1 else ended for run in runs), *teachers)
    unit = f" ({scores.unit})" if scores.points else ""
    text = f"Greedy answers to held-out prompts, with their scores{unit}."
    if teachers:
        text += " The teacher's are its own, to the prompt that it sees."
    if any(run.history.config.get("teacher_url") for run in runs):
        text += " A teacher at a URL only scores: it is not asked for answers."
    table = plain_table(headings, rows, caption="answers of the first and the last evaluation", classes="answers")
    return join([element("p", text, class_="aside"), table])


def _later(run: ReportRun) -> dict[Question, Answer]:
    """What the policy answered at the last evaluation; nothing where that is the first one, too."""
    last = answers_of(run.history.answers, "last")
    first = answers_of(run.history.answers, "first")
    return {question: answer for question, answer in last.items() if answer not in first.values()}


def _teachers(runs: Sequence[ReportRun]) -> dict[str, dict[Question, Answer]]:
    """Heading -> what a teacher answered; runs whose teachers answered alike have one column."""
    columns: dict[str, dict[Question, Answer]] = {}
    for run in runs:
        answers = answers_of(run.history.answers, "last", who="teacher")
        texts = {question: answer.completion for question, answer in answers.items()}
        if texts and texts not in [{q: answer.completion for q, answer in other.items()} for other in columns.values()]:
            columns[f"teacher of {run.name}" if len(runs) > 1 else "teacher"] = answers
    return columns


def _cell(answer: Answer | None, scores: ScoreFormat) -> Html:
    if answer is None:
        return Html(MISSING)
    text = shorten(answer.completion.strip(), LONGEST) or "(nothing)"
    return join([element("q", text), element("small", f"score {scores.write(answer.score)}")])


def settings_section(runs: Sequence[ReportRun]) -> Html:
    """Every field of the configurations, the changes at a resume, and the software versions."""
    changes = [f"{run.name}, after step {step}: {text}" for run in runs for step, text in run.history.changes.items()]
    return join(
        [
            _table("field", "value", [(run.name, run.history.config) for run in runs], lacks="configuration"),
            *([element("h3", "Changed at a resume")] if changes else []),
            *(element("p", text) for text in changes),
            element("h3", "Versions", id="versions"),
            _table("package", "version", [(run.name, run.history.details.versions) for run in runs], lacks="versions"),
        ]
    )


def _table(name: str, value: str, columns: Sequence[tuple[str, Mapping[str, Any]]], *, lacks: str) -> Html:
    names = list(dict.fromkeys(name for _, values in columns for name in values))
    if not names:
        return element("p", f"The record does not hold the {lacks}.", class_="missing")
    headings = (name, *(run if len(columns) > 1 else value for run, _ in columns))
    rows = [
        [
            element("code", row_name),
            *(shorten(setting(values[row_name]), LONGEST) if row_name in values else MISSING for _, values in columns),
        ]
        for row_name in names
    ]
    return plain_table(headings, rows, caption=lacks, classes="settings")


@cache
def _asset(names: Sequence[str]) -> str:
    folder = files("klamp.report") / "assets"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
