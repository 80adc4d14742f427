"""The table of an ablation: for each arm the mean over seeds with Student's interval; as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from klamp.ablation.outcome import COLUMNS, Outcome, retained_skills

CONFIDENCE = 0.95
"""Of every interval."""
COMPARED = {"rl/after": "rl/difference", "retained/after": "retained/difference"}
"""Number in which every arm is compared with the first one -> the number that is the difference."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an arm: the mean over its seeds, with Student's interval if the seeds have a spread."""

    values: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm: its values, how many of its runs are done, why others failed, and its cells by the name of a column."""

    arm: str
    values: Mapping[str, Any]
    done: int
    failures: tuple[str, ...]
    cells: Mapping[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of an ablation: one row per arm; the others are compared with the first one."""

    rows: tuple[ArmRow, ...]
    rl_skills: tuple[str, ...]
    retained: tuple[str, ...]


def cell_of(by_seed: Mapping[int, float]) -> Cell:
    """The cell of some values by seed, at least one.

    The interval takes the values for normal noise over seeds; there is none if they agree to rounding. Source: Student.
    """
    values, interval = tuple(by_seed.values()), None
    spread = stdev(values) if len(values) > 1 else 0.0
    if spread > 1e-12 * max(map(abs, values)):
        from scipy import stats

        error = spread / len(values) ** 0.5
        low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=fmean(values), scale=error)
        interval = float(low), float(high)
    return Cell(values=values, mean=fmean(values), interval=interval, seeds=tuple(by_seed))


def summarise(outcomes: Sequence[Outcome]) -> Table:
    """Make the table from the outcomes of all runs; a difference pairs runs with the same seed."""
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, []).append(outcome)
    rows: list[ArmRow] = []
    for arm, unordered in arms.items():
        runs = sorted(unordered, key=lambda run: run.seed)
        by_seed = {c.name: {o.seed: x for o in runs if (x := c.value(o)) is not None} for c in COLUMNS}
        for name, difference in COMPARED.items() if rows else ():
            first = rows[0].cells.get(name)
            control = dict(zip(first.seeds, first.values, strict=True)) if first else {}
            by_seed[difference] = {seed: x - control[seed] for seed, x in by_seed[name].items() if seed in control}
        failures = tuple(f"seed {run.seed}: {run.error}" for run in runs if run.state == "failed")
        cells = {name: cell_of(values) for name, values in by_seed.items() if values}
        done = len(runs) - len(failures)
        rows.append(ArmRow(arm=arm, values=dict(runs[0].values), done=done, failures=failures, cells=cells))
    return Table(
        rows=tuple(rows),
        rl_skills=tuple(dict.fromkeys(o.rl_skill for o in outcomes if o.rl_skill)),
        retained=tuple(dict.fromkeys(skill for o in outcomes for skill in retained_skills(o))),
    )


def number(value: float) -> str:
    """A number with four significant digits; in powers of ten only if it is very large or very small."""
    if abs(value) >= 9999.5 and abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.4g}" if value else "0"


def cell_text(cell: Cell | None, seeds: int) -> str:
    """A cell as text: `0.8123 [0.79, 0.83]`, with the number of seeds if some of them lack the number."""
    if cell is None:
        return "-"
    ends = f" [{number(cell.interval[0])}, {number(cell.interval[1])}]" if cell.interval else ""
    few = "" if len(cell.values) == seeds else f" ({len(cell.values)} of {seeds})"
    return number(cell.mean) + ends + few


def text_table(table: Table) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The heading and the rows of the table, as text; without columns that are empty."""
    first = table.rows[0].arm if table.rows else ""
    headings = {column.name: column.heading for column in COLUMNS if column.heading}
    headings |= {"rl/difference": f"RL skill, minus {first}", "retained/difference": f"retained, minus {first}"}
    names = [name for name in headings if any(name in row.cells for row in table.rows)]
    rows: list[tuple[str, ...]] = []
    for row in table.rows:
        seeds = f"{row.done}, {len(row.failures)} failed" if row.failures else str(row.done)
        rows.append((row.arm, seeds, *(cell_text(row.cells.get(name), row.done) for name in names)))
    return ("arm", "seeds", *(headings[name] for name in names)), rows


def notes(table: Table) -> tuple[str, ...]:
    """Sentences on how to read the table."""
    sentences: list[str] = []
    if table.rl_skills:
        kept = f"; retained are {', '.join(table.retained)}" if table.retained else ""
        sentences.append(f"The RL skill is {', '.join(table.rl_skills)}{kept}.")
        sentences.append("KL is exact, on held-out prompts, to the model that training started from (start).")
    most = max((row.done for row in table.rows), default=0)
    if most == 1:
        sentences.append("One seed per arm: there is no interval, and a difference between arms may be chance.")
    elif most > 1:
        sentences.append(f"Mean over seeds [{100 * CONFIDENCE:g} % Student interval of the mean].")
        sentences.append("Differences pair runs with the same seed; an interval that holds 0 shows no difference.")
    return tuple(sentences)


def markdown(table: Table) -> str:
    """The table as a Markdown page: the table, the notes, and the runs that failed."""
    if not table.rows:
        return "No run has ended.\n"
    heading, rows = text_table(table)
    lines = (heading, ("---", *("---:" for _ in heading[1:])), *rows)
    parts = ["\n".join(f"| {' | '.join(map(escaped, cells))} |" for cells in lines), *map(escaped, notes(table))]
    if failures := [f"- {escaped(row.arm)}, {escaped(text)}" for row in table.rows for text in row.failures]:
        parts.append("## Runs that failed\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """A text on one line, with nothing that Markdown or HTML would interpret."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return plain.replace("|", "\\|").replace("*", "\\*").replace("`", "\\`")


def plain(table: Table) -> dict[str, Any]:
    """The table as plain data for JSON: every number with its seeds, nothing rounded."""
    return {**asdict(table), "confidence": CONFIDENCE, "notes": notes(table)}
