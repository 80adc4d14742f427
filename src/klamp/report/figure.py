"""The frame of every chart: title, legend, the value under the cursor, a table of the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klamp.report.text import Html, element


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a legend."""

    swatch: Html
    """A small drawing of the curve or band."""
    label: str
    """The name of the curve or band."""
    values: Sequence[tuple[str, int]] = ()
    """Its latest values, each with its column in the table; the script shows those under the cursor in their place."""
    span: str = ""
    """From the lowest to the highest of the curves that it is the mean of."""


def key(classes: str, dot: str = "") -> Html:
    """The small sample of a curve or band in a legend."""
    dots = [element("path", d=dot, class_=f"dot {classes.split()[1]}")] if dot else []
    sample = (
        element("rect", x=0, y=0, width=22, height=10, class_=classes)
        if classes == "band"
        else element("path", d="M0 5H22", class_=classes)
    )
    return element("svg", sample, *dots, class_="key", viewBox="0 0 22 10", aria_hidden="true")


def figure(
    *,
    name: str,
    title: str,
    unit: str,
    text: str,
    drawing: Html,
    entries: Sequence[Entry],
    at: str,
    table: Html,
    plot: str | None = None,
) -> Html:
    """A chart inside its frame.

    Args:
        name: of the chart, unique on the page.
        title: in a few words.
        unit: of the values.
        text: what it says.
        drawing: the SVG element.
        entries: the legend.
        at: where the legend's values are from.
        table: the numbers.
        plot: what the script draws it from, besides the table, as JSON; None: it is not drawn again.
    """
    items = [
        element(
            "li",
            entry.swatch,
            element("span", entry.label, class_="label"),
            *(element("span", value, class_="value", data_column=column) for value, column in entry.values),
            *([element("span", entry.span, class_="span")] if entry.span else []),
        )
        for entry in entries
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", title, id=f"{name}-heading"),
            element("span", unit, class_="unit"),
            element("span", at, class_="at"),
        ),
        element("ul", *items, class_="legend"),
        element("div", drawing, class_="plot"),
        element("p", text, class_="says"),
        table,
        id=name,
        class_="card",
        aria_labelledby=f"{name}-heading",
        data_plot=plot,
    )


def data_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> Html:
    """The table of a chart's numbers, closed until it is clicked.

    Args:
        headings: of the columns.
        rows: the first cell of each is its heading.
        caption: what the numbers are.
    """
    return element(
        "details",
        element("summary", "Numbers", element("span", f" of: {caption}", class_="unseen")),
        plain_table(headings, rows, caption=caption, numbers=True),
        class_="data",
    )


def plain_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, numbers: bool = False, classes: str = ""
) -> Html:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        headings: of the columns.
        rows: text or markup; the first cell of each is its heading.
        caption: what it is, for who cannot see it.
        numbers: whether the cells are numbers.
        classes: more classes.
    """
    head = element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    table = element(
        "table",
        element("caption", caption, class_=None if numbers else "unseen"),
        head,
        element("tbody", *body),
        class_=" ".join(filter(None, ("numbers" if numbers else "", classes))) or None,
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {caption}")
