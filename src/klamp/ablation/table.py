"""The table of an ablation: for each arm the mean over seeds and its bootstrap interval; as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from klamp.ablation.outcome import BY_NAME, COLUMNS, GROUPS, Outcome, TableColumn, retained_skills
from klamp.ablation.statistics import CONFIDENCE, Comparison, Interval, bootstrap_interval, compare

MISSING = "-"
JUDGED = ("rl/after", "retained/after")
"""The columns that arms are compared in, where higher is better: the trained skill and the retained ones."""
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
    comparisons: Mapping[str, Mapping[str, Comparison]]
    """Name of a column of `JUDGED` -> arm -> that arm against the control, where they have two seeds in common."""
    rl_skills: tuple[str, ...]
    """Skills that were trained; usually one."""
    retained: tuple[str, ...]
    """Skills that were measured and not trained."""

    @property
    def control(self) -> str:
        """The arm that the others are compared with: the first one."""
        return self.rows[0].arm if self.rows else ""


class Section(NamedTuple):
    """One table of a page, as text."""

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summarise(outcomes: Sequence[Outcome]) -> Table:
    """Make the table from the outcomes of the runs.

    A value that is missing or not finite is left out of its cell, and the cell says from how many seeds it comes.

    Args:
        outcomes: of all runs, failed ones too.
    """
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, []).append(outcome)
    rows = tuple(_row(arm, runs) for arm, runs in arms.items())
    return Table(
        columns=tuple(column for column in COLUMNS if any(column.name in row.cells for row in rows)),
        rows=rows,
        comparisons={name: _against_control(rows, name) for name in JUDGED},
        rl_skills=tuple(dict.fromkeys(o.rl_skill for o in outcomes if o.rl_skill)),
        retained=tuple(dict.fromkeys(skill for o in outcomes for skill in retained_skills(o))),
    )


def _against_control(rows: Sequence[ArmRow], name: str) -> dict[str, Comparison]:
    arms = {
        row.arm: dict(zip(row.cells[name].seeds, row.cells[name].values, strict=True))
        for row in rows
        if name in row.cells
    }
    return compare(arms, control=rows[0].arm) if rows and rows[0].arm in arms else {}


def _row(arm: str, runs: Sequence[Outcome]) -> ArmRow:
    ordered = sorted(runs, key=lambda run: run.seed)
    cells = {column.name: _cell(column, ordered) for column in COLUMNS}
    failed = [run for run in ordered if run.state == "failed"]
    return ArmRow(
        arm=arm,
        values=dict(ordered[0].values),
        done=len(ordered) - len(failed),
        failed=len(failed),
        cells={name: cell for name, cell in cells.items() if cell is not None},
        failures=tuple(f"seed {run.seed}: {run.error or 'no reason was given'}" for run in failed),
    )


def _cell(column: TableColumn, runs: Sequence[Outcome]) -> Cell | None:
    found = {run.seed: value for run in runs if (value := column.value(run)) is not None}
    return cell_of(tuple(found.values()), tuple(found)) if found else None


def cell_of(values: tuple[float, ...], seeds: tuple[int, ...] = ()) -> Cell:
    """The cell of some values, at least one.

    Args:
        values: one per seed.
        seeds: of the values; empty where nobody compares them.
    """
    return Cell(values=values, mean=fmean(values), interval=bootstrap_interval(values), seeds=seeds)


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


def sections(table: Table) -> list[Section]:
    """The tables of the page, those that there is data for: one per group of columns, then the comparisons."""
    found: list[Section] = []
    for group, title in GROUPS.items():
        if columns := [column for column in table.columns if column.group == group]:
            rows = (
                (row.arm, _seeds(row), *(cell_text(row.cells.get(column.name), row.done) for column in columns))
                for row in table.rows
            )
            found.append(Section(title, ("arm", "seeds", *(column.heading for column in columns)), tuple(rows)))
    compared = [(name, arm, each) for name, arms in table.comparisons.items() for arm, each in arms.items()]
    if compared:
        rows = (
            (arm, BY_NAME[name].title, str(len(each.differences)), _difference(each), _or_missing(each.p))
            for name, arm, each in compared
        )
        heading = ("arm", "number", "seeds", "difference", "p, Holm")
        found.append(Section(f"Against {table.control}, seed by seed", heading, tuple(rows)))
    return found


def _seeds(row: ArmRow) -> str:
    return f"{row.done}, {row.failed} failed" if row.failed else str(row.done)


def _difference(found: Comparison) -> str:
    ends = f" [{_signed(found.interval.low)}, {_signed(found.interval.high)}]" if found.interval else ""
    return _signed(found.mean) + ends


def _or_missing(value: float | None) -> str:
    return MISSING if value is None else number(value)


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
        found.append(f"Mean over seeds [{100 * CONFIDENCE:g} % bootstrap interval of the mean].")
        if most < FEW_SEEDS:
            found.append(f"With {most} seeds the intervals are rough, and narrower than their name says.")
    if any(table.comparisons.values()):
        found.append(
            f"Differences to {table.control} are those of runs with the same seed: Student's interval, the p of a "
            "paired t-test with Holm's correction over the arms. Both take differences for normal noise. A difference "
            f"is shown where p is below {1 - CONFIDENCE:.2f}; without a p it is the same in every seed."
        )
    return tuple(found)


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def markdown(table: Table) -> str:
    """The table as a Markdown page: the tables, the notes, and the runs that failed."""
    parts: list[str] = []
    for title, heading, rows in sections(table):
        rule = ("---", *("---:" for _ in heading[1:]))
        parts.append(f"## {escaped(title)}\n\n" + "\n".join(map(_pipes, (heading, rule, *rows))))
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
    found = {
        **asdict(table),
        "columns": [{n: v for n, v in vars(each).items() if n != "read"} for each in table.columns],
    }
    return {**found, "confidence": CONFIDENCE, "control": table.control, "notes": notes(table)}
