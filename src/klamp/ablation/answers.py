"""The same held-out questions before training and after it, a column for each arm, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from klamp.ablation.plan import Run, run_folder
from klamp.ablation.table import escaped
from klamp.training.folders import ANSWERS, lines_of

MARKDOWN = "answers.md"
"""The file that is written into the folder of the ablation."""

LONGEST = 160
"""Characters of an answer that are shown."""

Question: TypeAlias = tuple[str, str]
"""(skill, question)."""


def markdown(arms: Mapping[str, Sequence[Mapping[str, Any]]], *, seed: int) -> str:
    """The table of answers: one row per question, first what was answered before training.

    Args:
        arms: name of an arm -> the rows of its run's answers.jsonl; what the first arm answered before stands for all.
        seed: that of the runs.
    """
    answers = {arm: rows for arm, rows in arms.items() if rows}
    if not answers:
        return ""
    first = next(iter(answers.values()))
    before = _at(first, min(row["step"] for row in first))
    after = {arm: _at(rows, max(row["step"] for row in rows)) for arm, rows in answers.items()}
    lines = [("question", "before", *after), ("---",) * (len(after) + 2)]
    for (skill, question), text in before.items():
        cells = (found.get((skill, question), "") for found in after.values())
        lines.append((f"{question} ({skill})", text, *cells))
    rows = "".join(f"| {' | '.join(escaped(cell) for cell in line)} |\n" for line in lines)
    return f"Greedy answers to held-out questions, seed {seed}.\n\n{rows}"


def _at(rows: Sequence[Mapping[str, Any]], step: int) -> dict[Question, str]:
    return {(row["skill"], row["question"]): _short(row["completion"]) for row in rows if row["step"] == step}


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"


def write_answers(every: Sequence[Run], folder: Path) -> tuple[Path, ...]:
    """Write the answers of the first seed's runs; nothing where no run wrote any.

    Args:
        every: the runs of the plan.
        folder: of the ablation.
    """
    seed = every[0].seed
    rows = {run.arm.name: lines_of(run_folder(folder, run) / ANSWERS) for run in every if run.seed == seed}
    text = markdown(rows, seed=seed)
    if not text:
        return ()
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    return (folder / MARKDOWN,)
