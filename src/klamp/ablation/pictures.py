"""The picture of an ablation: every skill's score against the KL of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from klamp.ablation.outcome import Outcome, retained_skills

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
"""Colours that colour-blind readers can tell apart (Okabe and Ito), without yellow, which vanishes on white."""
MARKS = "os^DvPX<>*hp"
"""With the colours, the first 84 arms all look different."""
PICTURE = "frontier.png"
KL = "kl/reverse_sequence"
LONGEST_NAME = 48


def write_picture(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, ...]:
    """Draw frontier.png into a folder; returns the file, or nothing if no run has a KL."""
    figure = draw_frontier(outcomes)
    if figure is None:
        return ()
    figure.savefig(folder / PICTURE, dpi=130, bbox_inches="tight")
    return (folder / PICTURE,)


def draw_frontier(outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw every skill's score against the KL of a completion: a point per run, larger ones for the means of the arms.

    The trained skill is the first panel; a dotted line is the score before training. None if no run has a KL.
    """
    done = [outcome for outcome in outcomes if outcome.state == "done" and KL in outcome.numbers]
    skills = list(dict.fromkeys(skill for o in done for skill in (o.rl_skill, *retained_skills(o)) if skill in o.after))
    if not skills:
        return None
    from matplotlib.figure import Figure

    lowest, highest = min(o.numbers[KL] for o in done), max(o.numbers[KL] for o in done)
    figure = Figure(figsize=(3.2 * len(skills), 3.4), layout="constrained")
    grid = figure.subplots(1, len(skills), squeeze=False)[0]
    for axes, skill in zip(grid, skills, strict=True):
        for i, arm in enumerate(dict.fromkeys(outcome.arm for outcome in done)):
            points = [(o.numbers[KL], o.after[skill]) for o in done if o.arm == arm and skill in o.after]
            if points:
                x, y = zip(*points, strict=True)
                look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)], "linewidths": 0}
                axes.scatter(x, y, s=16, alpha=0.5, **look)
                axes.scatter(fmean(x), fmean(y), s=70, label=named(arm), **look)
        if before := [o.before[skill] for o in done if skill in o.before]:
            axes.axhline(fmean(before), color="#777777", linestyle=":", linewidth=1.2)
        if 30 * lowest < highest and lowest > 0:
            axes.set_xscale("log")
        trained = "trained" if any(o.rl_skill == skill for o in done) else "not trained"
        tidy(axes, x="KL(policy‖start) (nats/sequence)", title=f"{named(skill)} ({trained})")
    grid[0].set_ylabel("score after training; dotted: before", fontsize=9)
    arms = grid[0].get_legend_handles_labels()
    figure.legend(*arms, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return figure


def named(text: str) -> str:
    """A name as matplotlib can show it: no mathematics, never hidden, a long one without its middle."""
    end = LONGEST_NAME // 2
    short = text if len(text) <= LONGEST_NAME else f"{text[: end - 1]}…{text[-end:]}"
    return ("\u200b" if short.startswith("_") else "") + short.replace("$", r"\$") or "(no name)"


def tidy(axes: Any, *, x: str = "", title: str = "") -> None:
    """Put labels and a light grid on a diagram, and remove its box."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
