"""Writes the picture of where-it-ends.md from `klamp.verify.convergence`: `python docs/where_it_ends.py`, a minute.

`klamp verify convergence` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from klamp.verify.convergence import TERMS, ends

PICTURE = Path(__file__).resolve().parent / "where-it-ends.svg"
SHOWN = ("fixed length", "token mean", "sequence mean")
MARKS = ("o", "s", "D")


def draw() -> Figure:
    """KL against the optimum's and length against the optimum's, six tokens, one row for each term."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(TERMS)
    for loss, mark in zip(SHOWN, MARKS, strict=True):
        found = [ends(name, loss)[-1] for name in names]
        size = 9 - 2.2 * SHOWN.index(loss)  # equal ends lie upon each other
        rows = [i for i, end in enumerate(found) if end.stands]
        style = {"linestyle": "", "marker": mark, "markersize": size, "label": loss, "fillstyle": "none"}
        left.plot([found[i].kl / found[i].optimal_kl for i in rows], rows, **style)
        right.plot([found[i].length - found[i].optimal_length for i in rows], rows, **style)
        if loss == SHOWN[0]:
            for i in (i for i, end in enumerate(found) if not end.stands):
                left.text(1.05, i, "runs away", va="center", fontsize=8)
    for axes, value in ((left, 1.0), (right, 0.0)):
        axes.axvline(value, color="0.6", linewidth=1, zorder=0)
        axes.grid(axis="x", color="0.9")
    left.set_xlabel("KL to the reference, divided by the optimum's")
    right.set_xlabel("tokens more than the optimum")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.legend(fontsize=8, loc="upper right")
    figure.suptitle("Where each KL ends: completions of up to 6 tokens, beta 0.2, leave-one-out baseline", fontsize=11)
    return figure


def main() -> None:
    """Write the picture."""
    mpl.rcParams["svg.hashsalt"] = "klamp"
    draw().savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
