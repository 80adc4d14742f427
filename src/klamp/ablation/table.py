"""The table of an ablation: for each arm the mean over seeds and its bootstrap interval; as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klamp.ablation.outcome import COLUMNS, GROUPS, Group, Outcome, TableColumn, retained_skills
from klamp.ablation.statistics import Comparison, Interval, bootstrap_interval, compare

MISSING = "-"
FEW_SEEDS = 10
"""Below this many seeds the table says that its intervals are rough."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an arm: the mean over its seeds, with an interval."""

    values: tuple[float, ...]
    """The values, one per seed that has the number, in the order of the seeds."""
    mean: float
    """The mean of the values."""
    interval: Interval | None
    """The bootstrap interval of the mean; None with one seed."""
    seeds: tuple[int, ...] = ()
    """The seeds of the values; empty where nobody compares them."""


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One row of the table: an arm, its cells, and how many of its seeds were done and failed."""

    arm: str
    """The name of the arm."""
    values: Mapping[str, Any]
    """The swept fields of the arm and their values."""
    done: int
    """The seeds whose run was done."""
    failed: int
    """The seeds whose run failed."""
    cells: Mapping[str, Cell]
    """Name of a column -> its cell, where the arm has that number."""
    failures: tuple[str, ...]
    """Why runs failed: "seed 2: ..."."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of an ablation."""

    columns: tuple[TableColumn, ...]
    """The columns in which any arm has a number."""
    rows: tuple[ArmRow, ...]
    """The rows, one per arm, in the order of the outcomes."""
    confidence: float
    """The confidence of the intervals, such as 0.95."""
    rl_skills: tuple[str, ...]
    """Skills that were trained; usually one."""
    retained: tuple[str, ...]
    """Skills that were measured and not trained."""

    @property
    def control(self) -> str:
        """The arm that the others are compared with: the first one."""
        return self.rows[0].arm if self.rows else ""

    @property
    def judged(self) -> tuple[TableColumn, ...]:
        """The columns that arms are compared in: the trained skill and the retained ones."""
        return tuple(column for column in self.columns if column.name in ("rl/after", "retained/after"))


def summarise(outcomes: Sequence[Outcome], *, confidence: float = 0.95) -> Table:
    """Make the table from the outcomes of the runs.

    A value that is missing or not finite is left out of its cell, and the cell says from how many seeds it comes.

    Args:
        outcomes: of all runs, failed ones too.
        confidence: of the intervals.
    """
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, []).append(outcome)
    rows = tuple(_row(arm, runs, confidence) for arm, runs in arms.items())
    return Table(
        columns=tuple(column for column in COLUMNS if any(column.name in row.cells for row in rows)),
        rows=rows,
        confidence=confidence,
        rl_skills=tuple(dict.fromkeys(o.rl_skill for o in outcomes if o.rl_skill)),
        retained=tuple(dict.fromkeys(skill for o in outcomes for skill in retained_skills(o))),
    )


def _row(arm: str, runs: Sequence[Outcome], confidence: float) -> ArmRow:
    ordered = sorted(runs, key=lambda run: run.seed)
    cells = {column.name: _cell(column, ordered, confidence) for column in COLUMNS}
    failed = [run for run in ordered if run.state == "failed"]
    return ArmRow(
        arm=arm,
        values=dict(ordered[0].values),
        done=len(ordered) - len(failed),
        failed=len(failed),
        cells={name: cell for name, cell in cells.items() if cell is not None},
        failures=tuple(f"seed {run.seed}: {run.error or 'no reason was given'}" for run in failed),
    )


def _cell(column: TableColumn, runs: Sequence[Outcome], confidence: float) -> Cell | None:
    found = {run.seed: value for run in runs if (value := column.value(run)) is not None}
    if not found:
        return None
    values = tuple(found.values())
    interval = bootstrap_interval(values, confidence=confidence)
    return Cell(values=values, mean=sum(values) / len(values), interval=interval, seeds=tuple(found))


def number(value: float) -> str:
    """A number with four significant digits; in powers of ten only where it is very large or very small."""
    if abs(value) >= 9999.5 and abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.4g}" if value else "0"


def cell_text(cell: Cell | None, seeds: int) -> str:
    """A cell as text: `0.8123 [0.79, 0.83]`, with the number of seeds where some lack it."""
    if cell is None:
        return MISSING
    text = number(cell.mean)
    if cell.interval is not None:
        text += f" [{number(cell.interval.low)}, {number(cell.interval.high)}]"
    return text if len(cell.values) == seeds else f"{text} ({len(cell.values)} of {seeds})"


def seeds_text(row: ArmRow) -> str:
    """How many seeds of an arm were done, and how many failed."""
    return f"{row.done}, {row.failed} failed" if row.failed else str(row.done)


def lines(table: Table, group: Group) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The heading and the rows for one group of columns, as text; both empty where the group has no data.

    Args:
        table: the whole table.
        group: which columns; see `GROUPS`.
    """
    columns = [column for column in table.columns if column.group == group]
    if not columns:
        return (), ()
    rows = (
        (row.arm, seeds_text(row), *(cell_text(row.cells.get(column.name), row.done) for column in columns))
        for row in table.rows
    )
    return ("arm", "seeds", *(column.heading for column in columns)), tuple(rows)


def notes(table: Table) -> tuple[str, ...]:
    """Sentences on how to read the table, and on what it does not say."""
    found: list[str] = []
    if table.rl_skills:
        skills = f"The RL skill is {', '.join(table.rl_skills)}"
        found.append(f"{skills}; retained are {', '.join(table.retained)}." if table.retained else f"{skills}.")
    if any(column.group == "distance" for column in table.columns):
        found.append("KL is exact, on held-out prompts, to the model that training started from (start).")
    most = max((row.done for row in table.rows), default=0)
    if most == 1:
        found.append("One seed per arm: there is no interval, and a difference between arms may be chance.")
    elif most > 1:
        found.append(f"Mean over seeds [{100 * table.confidence:.4g} % bootstrap interval of the mean].")
        if most < FEW_SEEDS:
            found.append(f"With {most} seeds the intervals are rough, and narrower than their name says.")
    if comparison_lines(table)[0]:
        found.append(
            f"Differences to {table.control} are those of runs with the same seed: Student's interval, the p of a "
            "paired t-test with Holm's correction over the arms, Hedges' g. Could have shown: the true difference "
            "that 8 of 10 repetitions would find, at the spread seen. All of them take differences for normal noise."
        )
    return (*found, *filter(None, (reading(table, column) for column in table.judged)))


def reading(table: Table, column: TableColumn) -> str:
    """Which arm has the best mean, and which arms differ from the first one; "" where there is only one arm.

    Args:
        table: the whole table.
        column: one whose direction is known.
    """
    sign = -1 if column.better == "lower" else 1
    rows = [row for row in table.rows if column.name in row.cells]
    if len(rows) < 2:
        return ""
    best = max(sign * row.cells[column.name].mean for row in rows)
    first = [row.arm for row in rows if sign * row.cells[column.name].mean == best]
    text = f"{column.title}, best mean: {_listed(first)} ({number(sign * best)})"
    found = compared(table, column)
    if not found:
        return f"{text}; no arm has two seeds in common with {table.control}, so no test."
    shown = [f"{arm} ({_signed(each.mean)}, p {number(each.p or 0.0)})" for arm, each in found.items() if each.is_shown]
    open_ones = [
        f"{arm} ({number(each.detectable)})"
        for arm, each in found.items()
        if each.detectable is not None and not each.is_shown
    ]
    untested = [arm for arm, each in found.items() if each.p is None]
    parts = [f"a difference is shown for {_listed(shown)}"] if shown else []
    if open_ones:
        parts.append(f"none is shown for {_listed(open_ones)}; in brackets what these seeds could have shown")
    if untested:
        parts.append(f"no test for {_listed(untested)}, the same difference in every seed")
    return f"{text}. Against {table.control}, seed by seed: {'; '.join(parts)}."


def compared(table: Table, column: TableColumn) -> dict[str, Comparison]:
    """Each arm against the first one in a column; empty where the first one has no two seeds in common with any.

    Args:
        table: the whole table.
        column: the number that is compared.
    """
    arms = {
        row.arm: dict(zip(row.cells[column.name].seeds, row.cells[column.name].values, strict=True))
        for row in table.rows
        if column.name in row.cells
    }
    if table.control not in arms:
        return {}
    return compare(arms, control=table.control, confidence=table.confidence)


def comparison_lines(table: Table) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The heading and the rows of the comparisons with the first arm, as text; both empty where there are none.

    Args:
        table: the whole table.
    """
    rows = [
        (
            arm,
            column.title,
            str(len(each.differences)),
            _signed(each.mean)
            + (f" [{_signed(each.interval.low)}, {_signed(each.interval.high)}]" if each.interval else ""),
            MISSING if each.p is None else number(each.p),
            MISSING if each.effect is None else number(each.effect),
            MISSING if each.detectable is None else number(each.detectable),
        )
        for column in table.judged
        for arm, each in compared(table, column).items()
    ]
    heading = ("arm", "number", "seeds", "difference", "p, Holm", "effect, g", "could have shown")
    return (heading, tuple(rows)) if rows else ((), ())


def comparison_title(table: Table) -> str:
    """The heading of the comparisons."""
    return f"Against {table.control}, seed by seed"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def markdown(table: Table) -> str:
    """The table as a Markdown page: the tables, the notes, and the runs that failed."""
    parts: list[str] = []
    for group, title in GROUPS.items():
        heading, rows = lines(table, group)
        if heading:
            rule = ("---", *("---:" for _ in heading[1:]))
            parts.append(f"## {title}\n\n" + "\n".join(_pipes(cells) for cells in (heading, rule, *rows)))
    heading, rows = comparison_lines(table)
    if heading:
        rule = ("---", "---", *("---:" for _ in heading[2:]))
        title = escaped(comparison_title(table))
        parts.append(f"## {title}\n\n" + "\n".join(_pipes(cells) for cells in (heading, rule, *rows)))
    parts += [escaped(note) for note in notes(table)]
    failures = [f"- {escaped(row.arm)}, {escaped(text)}" for row in table.rows for text in row.failures]
    if failures:
        parts.append("## Runs that failed\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n" if parts else "No run has ended.\n"


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def escaped(text: str) -> str:
    """A text on one line, with nothing in it that Markdown or HTML would interpret."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return plain.replace("|", "\\|").replace("*", "\\*").replace("`", "\\`")


def plain(table: Table) -> dict[str, Any]:
    """The table as plain data for JSON: every number with its seeds, nothing rounded."""
    return {
        "confidence": table.confidence,
        "rl_skills": list(table.rl_skills),
        "retained": list(table.retained),
        "columns": [
            {"name": column.name, "title": column.title, "unit": column.unit, "better": column.better}
            for column in table.columns
        ],
        "arms": [
            {
                "arm": row.arm,
                "values": dict(row.values),
                "done": row.done,
                "failed": row.failed,
                "failures": list(row.failures),
                "numbers": {name: _plain_cell(cell) for name, cell in row.cells.items()},
            }
            for row in table.rows
        ],
        "control": table.control,
        "comparisons": [
            {"column": column.name, "arm": arm, **_plain_comparison(each)}
            for column in table.judged
            for arm, each in compared(table, column).items()
        ],
        "notes": list(notes(table)),
    }


def _plain_comparison(found: Comparison) -> dict[str, Any]:
    low, high = found.interval or (None, None)
    return {
        "differences": list(found.differences),
        "mean": found.mean,
        "low": low,
        "high": high,
        "p": found.p,
        "effect": found.effect,
        "detectable": found.detectable,
    }


def _plain_cell(cell: Cell) -> dict[str, Any]:
    low, high = cell.interval or (None, None)
    return {"mean": cell.mean, "low": low, "high": high, "values": list(cell.values), "seeds": list(cell.seeds)}


CSV = "table.csv"
"""The file that is written into the folder of the ablation."""


def csv_text(table: Table) -> str:
    """The table as CSV: a row per arm, number and seed, nothing rounded.

    Args:
        table: the table.
    """
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(("arm", "number", "title", "unit", "seed", "value"))
    for row in table.rows:
        for column in table.columns:
            cell = row.cells.get(column.name)
            for seed, value in zip(cell.seeds, cell.values, strict=True) if cell else ():
                rows.writerow((row.arm, column.name, column.title, column.unit, seed, repr(value)))
    return written.getvalue()
