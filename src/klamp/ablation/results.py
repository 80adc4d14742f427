"""The results of an ablation: a table (for each arm the mean over seeds with Student's interval), and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.ablation.outcome import Outcome, columns, retained_skills

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.95
"""Of every interval."""
HEADINGS = {
    "rl/after": "RL skill (score)",
    "retained/after": "retained skills (mean score)",
    "kl/reverse": "KL(policy‖start) (nats/token)",
    "kl/forward": "KL(start‖policy) (nats/token)",
    "length": "length (tokens)",
    "rl/difference": "RL skill, minus the first arm",
    "retained/difference": "retained, minus the first arm",
}
"""Column -> heading; the other numbers are in table.json only."""
COMPARED = {"rl/after": "rl/difference", "retained/after": "retained/difference"}
"""Number in which every arm is compared with the first one -> the number that is the difference."""
NOTES = (
    "KL is exact, on held-out prompts, to the model that training started from (start).",
    f"Mean over seeds [{100 * CONFIDENCE:g} % Student interval of the mean]; one seed has no interval.",
    "Differences pair runs with the same seed; an interval that holds 0 shows no difference.",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an arm: the mean over its seeds, with Student's interval if the seeds have a spread."""

    values: Mapping[int, float]
    """Seed -> value."""
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm: its values, how many of its runs are done, why others failed, and its cells by the name of a column."""

    arm: str
    values: Mapping[str, Any]
    done: int
    failures: tuple[str, ...]
    cells: Mapping[str, Cell]


class Result(NamedTuple):
    """The outcomes of all runs, failed ones too, in the order of the plan; the table, and the files for people."""

    folder: Path
    outcomes: tuple[Outcome, ...]
    table: Sequence[ArmRow]
    files: tuple[Path, ...]


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
    return Cell(values=by_seed, mean=fmean(values), interval=interval)


def summarise(outcomes: Sequence[Outcome]) -> list[ArmRow]:
    """Make the table from the outcomes of all runs; a difference pairs runs with the same seed."""
    rows: list[ArmRow] = []
    for arm in dict.fromkeys(outcome.arm for outcome in outcomes):
        runs = sorted((outcome for outcome in outcomes if outcome.arm == arm), key=lambda run: run.seed)
        by_seed: dict[str, dict[int, float]] = {}
        for run in runs:
            for name, value in columns(run).items():
                by_seed.setdefault(name, {})[run.seed] = value
        for name, difference in COMPARED.items() if rows else ():
            control = rows[0].cells[name].values if name in rows[0].cells else {}
            if pairs := {seed: x - control[seed] for seed, x in by_seed.get(name, {}).items() if seed in control}:
                by_seed[difference] = pairs
        failures = tuple(f"seed {run.seed}: {run.error}" for run in runs if run.state == "failed")
        cells, done = {name: cell_of(values) for name, values in by_seed.items()}, len(runs) - len(failures)
        rows.append(ArmRow(arm=arm, values=runs[0].values, done=done, failures=failures, cells=cells))
    return rows


def cell_text(cell: Cell | None, seeds: int) -> str:
    """A cell as text: `0.8123 [0.79, 0.83]`, with the number of seeds if some of them lack the number."""
    if cell is None:
        return "-"
    ends = f" [{cell.interval[0]:.4g}, {cell.interval[1]:.4g}]" if cell.interval else ""
    return f"{cell.mean:.4g}{ends}" + ("" if len(cell.values) == seeds else f" ({len(cell.values)} of {seeds})")


def text_table(table: Sequence[ArmRow]) -> list[tuple[str, ...]]:
    """The table as text, the headings first; without columns that are empty."""
    names = [name for name in HEADINGS if any(name in row.cells for row in table)]
    lines = [("arm", "seeds", *(HEADINGS[name] for name in names))]
    for row in table:
        seeds = f"{row.done}, {len(row.failures)} failed" if row.failures else str(row.done)
        lines.append((row.arm, seeds, *(cell_text(row.cells.get(name), row.done) for name in names)))
    return lines


def markdown(table: Sequence[ArmRow]) -> str:
    """The table as a Markdown page: the table, the runs that failed, and how to read it."""
    heading, *rows = (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in text_table(table))
    rule = "|---" * (heading.count(" | ") + 1) + "|"
    failures = [f"- failed: {row.arm}, {' '.join(text.split())}" for row in table for text in row.failures]
    return "\n\n".join(("\n".join((heading, rule, *rows)), *failures, *NOTES)) + "\n"


def draw_frontier(outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw every skill's score against the KL of a completion: a point per run, larger ones for the means of the arms.

    The trained skill is the first panel; a dotted line is the score before training. None if no run has a KL.
    """
    done = [outcome for outcome in outcomes if "kl/reverse_sequence" in columns(outcome)]
    skills = list(dict.fromkeys(skill for o in done for skill in (o.rl_skill, *retained_skills(o)) if skill in o.after))
    if not skills:
        return None
    from matplotlib.figure import Figure

    def kl(outcome: Outcome) -> float:
        return outcome.numbers["kl/reverse_sequence"]

    figure = Figure(figsize=(3.2 * len(skills), 3.4), layout="constrained")
    for axes, skill in zip(figure.subplots(1, len(skills), squeeze=False)[0], skills, strict=True):
        for i, arm in enumerate(dict.fromkeys(outcome.arm for outcome in done)):
            if points := [(kl(o), o.after[skill]) for o in done if o.arm == arm and skill in o.after]:
                x, y = zip(*points, strict=True)
                look = {"color": f"C{i % 10}", "marker": "os^DvPX<>*hp"[i % 12], "linewidths": 0}
                axes.scatter(x, y, s=16, alpha=0.5, **look)
                axes.scatter(fmean(x), fmean(y), s=70, label=f"\u200b{arm}", **look)  # a leading _ would hide it
        if before := [o.before[skill] for o in done if skill in o.before]:
            axes.axhline(fmean(before), color="#777777", linestyle=":", linewidth=1.2)
        if 0 < 30 * min(map(kl, done)) < max(map(kl, done)):
            axes.set_xscale("log")
        axes.set_xlabel("KL(policy‖start) (nats/sequence)", fontsize=9)
        trained = "trained" if any(o.rl_skill == skill for o in done) else "not trained"
        axes.set_title(f"{skill} ({trained})", fontsize=10, parse_math=False)
        axes.grid(visible=True, alpha=0.25)
    figure.axes[0].set_ylabel("score after training; dotted: before", fontsize=9)
    arms = figure.axes[0].get_legend_handles_labels()
    legend = figure.legend(*arms, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def write_results(outcomes: Sequence[Outcome], folder: Path) -> Result:
    """Write the table and the picture of the runs' outcomes into a folder."""
    table, figure = summarise(outcomes), draw_frontier(outcomes)
    plain = {"rows": [asdict(row) for row in table], "confidence": CONFIDENCE, "notes": NOTES}
    files = [folder / "table.md", folder / "table.json"]
    files[0].write_text(markdown(table), encoding="utf-8")
    files[1].write_text(json.dumps(plain, indent=2), encoding="utf-8")
    if figure is not None:
        files.append(folder / "frontier.png")
        figure.savefig(files[-1], dpi=130, bbox_inches="tight")
    return Result(folder=folder, outcomes=tuple(outcomes), table=table, files=tuple(files))
