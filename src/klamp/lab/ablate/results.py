"""The outcome of each run as a file; of all runs a table (means over seeds with Student's interval) and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from klamp.core.arguments import check_fields
from klamp.errors import DataError
from klamp.files import json_of
from klamp.lab.ablate.plan import Run, run_folder
from klamp.lab.folders import write_whole
from klamp.names import OUTCOME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.95  # of every interval
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
class Outcome:
    """The result of one run: done or failed, its numbers, its scores."""

    run: str
    arm: str
    seed: int
    values: Mapping[str, Any] = field(default_factory=dict)
    state: Literal["done", "failed"] = "done"
    error: str = ""  # why it failed; the first line says what happened
    rl_skill: str = ""  # the trained skill; the others are the retained ones
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts, before and after training."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of `klamp.lab.ablate.one_run`, and the `beta` of the last step."""


def write_outcome(folder: Path, outcome: Outcome) -> Outcome:
    """Write the outcome into a run's folder, completely or not at all; returns it."""
    write_whole(folder / OUTCOME, json.dumps(asdict(outcome), indent=2))
    return outcome


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome from a run's folder; None if the run is neither done nor failed, a DataError if damaged."""
    file = folder / OUTCOME
    if not file.exists():
        return None
    try:
        outcome = Outcome(**json_of(file.read_text(encoding="utf-8")))
        for scores in (outcome.before, outcome.after, outcome.numbers):
            sum(scores.values(), 0.0)  # a TypeError if one is no number
        check_fields(outcome)
        return outcome
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        fix = "delete that file; the same `klamp ablate` command then makes it again"
        raise DataError("the outcome of a run cannot be read", got=str(file), why=why, fix=fix) from error


def is_done(folder: Path, run: Run) -> bool:
    """Whether a run in the folder of an ablation is done; a failed run is not."""
    outcome = read_outcome(run_folder(folder, run))
    return outcome is not None and outcome.state == "done"


def failed(run: Run, error: str) -> Outcome:
    """The outcome of a run that failed; the first line of the error says what happened."""
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, state="failed", error=error)


def retained_skills(outcome: Outcome) -> tuple[str, ...]:
    """The skills that were not trained, with a score before and after."""
    return tuple(skill for skill in outcome.after if skill != outcome.rl_skill and skill in outcome.before)


def retained(outcome: Outcome, scores: Mapping[str, float]) -> float | None:
    """The mean score (`outcome.before` or `outcome.after`) of the skills that were not trained; None without any."""
    skills = retained_skills(outcome)
    return fmean(scores[skill] for skill in skills) if skills else None


def columns(outcome: Outcome) -> dict[str, float]:
    """Column -> number of a run; without numbers that are missing or not finite, and none of a run that failed."""
    scores = {"rl/after": outcome.after.get(outcome.rl_skill), "retained/after": retained(outcome, outcome.after)}
    values = {**scores, **outcome.numbers} if outcome.state == "done" else {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an arm: the mean over its seeds, with Student's interval if the seeds have a spread."""

    values: Mapping[int, float]  # seed -> value
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm: its values, how many of its runs are done and failed, and its cells by the name of a column."""

    arm: str
    values: Mapping[str, Any]
    done: int
    failed: int
    cells: Mapping[str, Cell]


class Result(NamedTuple):
    """The outcomes of all runs, failed ones too, in the order of the plan; the table, and the files for people."""

    folder: Path
    outcomes: tuple[Outcome, ...]
    table: Sequence[ArmRow]
    files: tuple[Path, ...]


def cell_of(by_seed: Mapping[int, float]) -> Cell:
    """The cell of some values by seed; no interval if they agree to rounding."""
    values, mean, interval = tuple(by_seed.values()), fmean(by_seed.values()), None
    if max(values) - min(values) > 1e-12 * max(map(abs, values)):
        from scipy import stats

        low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=mean, scale=stats.sem(values))
        interval = float(low), float(high)
    return Cell(values=by_seed, mean=mean, interval=interval)


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
        done, cells = sum(run.state == "done" for run in runs), {name: cell_of(x) for name, x in by_seed.items()}
        rows.append(ArmRow(arm=arm, values=runs[0].values, done=done, failed=len(runs) - done, cells=cells))
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
        seeds = f"{row.done}, {row.failed} failed" if row.failed else str(row.done)
        lines.append((row.arm, seeds, *(cell_text(row.cells.get(name), row.done) for name in names)))
    return lines


def markdown(table: Sequence[ArmRow]) -> str:
    """The table as a Markdown page, with notes on how to read it."""
    heading, *rows = (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in text_table(table))
    rule = "|---" * (heading.count(" | ") + 1) + "|"
    return "\n\n".join(("\n".join((heading, rule, *rows)), *NOTES)) + "\n"


def draw_frontier(outcomes: Sequence[Outcome]) -> Figure | None:
    """Every skill's score against the KL of a completion: runs, and larger points for arms; None: no run has a KL."""
    done = [outcome for outcome in outcomes if "kl/reverse_sequence" in columns(outcome)]
    skills = list(dict.fromkeys(skill for o in done for skill in (o.rl_skill, *retained_skills(o)) if skill in o.after))
    if not skills:
        return None
    from matplotlib.figure import Figure

    kl = {outcome.run: outcome.numbers["kl/reverse_sequence"] for outcome in done}
    figure = Figure(figsize=(3.2 * len(skills), 3.4), layout="constrained")
    for axes, skill in zip(figure.subplots(1, len(skills), squeeze=False)[0], skills, strict=True):
        for i, arm in enumerate(dict.fromkeys(outcome.arm for outcome in done)):
            if points := [(kl[o.run], o.after[skill]) for o in done if o.arm == arm and skill in o.after]:
                x, y = zip(*points, strict=True)
                look = {"color": f"C{i % 10}", "marker": "os^DvPX<>*hp"[i % 12], "linewidths": 0}
                axes.scatter(x, y, s=16, alpha=0.5, **look)
                axes.scatter(fmean(x), fmean(y), s=70, label=f"\u200b{arm}", **look)  # a leading _ would hide it
        if before := [o.before[skill] for o in done if skill in o.before]:
            axes.axhline(fmean(before), color="#777777", linestyle=":", linewidth=1.2)
        if 0 < 30 * min(kl.values()) < max(kl.values()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
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
