"""The same held-out questions before training and after it, a column for each arm, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from klamp.ablation.plan import Run, run_folder
from klamp.ablation.table import escaped
from klamp.diagnostics.history import Answer, answer_of, first_answers, last_answers
from klamp.training.folders import ANSWERS, each_readable, lines_of

MARKDOWN = "answers.md"
"""The file that is written into the folder of the ablation."""

LONGEST = 160
"""Characters of an answer that are shown."""


def markdown(arms: Mapping[str, Sequence[Answer]], *, seed: int) -> str:
    """The table of answers: one row per question, first what was answered before training.

    Args:
        arms: name of an arm -> the answers of its run; what the first arm answered before stands for all.
        seed: that of the runs.
    """
    answers = {arm: rows for arm, rows in arms.items() if rows}
    if not answers:
        return ""
    first = next(iter(answers.values()))
    before = first_answers(first)
    after = {arm: last_answers(found) for arm, found in answers.items()}
    lines = [("question", "before", *after), ("---",) * (len(after) + 2)]
    for (skill, question), answer in before.items():
        cells = (_cell(found.get((skill, question))) for found in after.values())
        lines.append((f"{question} ({skill})", _cell(answer), *cells))
    rows = "".join(f"| {' | '.join(escaped(cell) for cell in line)} |\n" for line in lines)
    return f"Greedy answers to held-out questions, seed {seed}.\n\n{rows}"


def _cell(answer: Answer | None) -> str:
    plain = "" if answer is None else " ".join(answer.completion.split())
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"


def write_answers(every: Sequence[Run], folder: Path) -> tuple[Path, ...]:
    """Write the answers of the first seed's runs; nothing where no run wrote any.

    Args:
        every: the runs of the plan.
        folder: of the ablation.
    """
    seed = every[0].seed
    arms = {run.arm.name: lines_of(run_folder(folder, run) / ANSWERS) for run in every if run.seed == seed}
    text = markdown({arm: each_readable(rows, answer_of) for arm, rows in arms.items()}, seed=seed)
    if not text:
        return ()
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    return (folder / MARKDOWN,)
