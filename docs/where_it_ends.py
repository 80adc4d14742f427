"""Writes the table and the picture of records/where-it-ends.md: `python docs/where_it_ends.py`, a minute.

Both come from `klamp.verify.convergence`; `klamp verify convergence` prints the table. A test repeats some rows.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from klamp.verify.convergence import LOSSES, answer_convergence, ends, terms
from klamp.verify.proofs.check import TextTable

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "records" / "where-it-ends.md", DOCS / "where-it-ends.svg"
BEGIN, END = "<!-- table: written by `python docs/where_it_ends.py` -->", "<!-- end of the table -->"
SHOWN = ("fixed length", "token mean", "sequence mean")
MARKS = ("o", "s", "D")


def table_lines(table: TextTable) -> list[str]:
    """A table of texts as lines of Markdown, its title above."""
    rows = ["| " + " | ".join(row).replace("||", "‖") + " |" for row in (table.columns, *table.rows)]
    title = table.title[0].upper() + table.title[1:].replace("||", "‖")
    return [f"{title}:", "", rows[0], "|" + "---|" * len(table.columns), *rows[1:], ""]


def with_table(page: str, table: TextTable) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(table_lines(table)) + END + after


def draw() -> Figure:
    """KL against the optimum's and length against the optimum's, six tokens, one row for each term."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(terms())
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
    left.set_xlabel("KL to the reference / that of the optimum")
    right.set_xlabel("length - that of the optimum, in tokens")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.legend(fontsize=8, loc="upper right")
    figure.suptitle("Where each KL ends: completions of up to 6 tokens, beta 0.2, leave-one-out, no std", fontsize=11)
    return figure


def main() -> None:
    """Write both."""
    (table,) = answer_convergence().tables
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    mpl.rcParams["svg.hashsalt"] = "klamp"
    draw().savefig(PICTURE, metadata={"Date": None})
    print(f"{PAGE}\n{PICTURE}, {len(LOSSES)} losses")


if __name__ == "__main__":
    main()
