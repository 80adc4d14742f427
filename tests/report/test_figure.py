"""The frame of a chart: its parts, named for those who cannot see it, and its table."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from klamp.report.figure import Entry, data_table, figure, key, plain_table
from klamp.report.text import element


def parsed(html: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(html))


def framed(**changes: object) -> ElementTree.Element:
    parts = {
        "name": "kl",
        "title": "KL <to the reference>",
        "unit": "nats per token",
        "text": "Grows & falls.",
        "drawing": element("svg", id="drawing"),
        "entries": [Entry(swatch=key("s0 line"), label="k3", values=[("0.12", 1), ("0.34", 2)])],
        "at": "step 7",
        "table": plain_table(["step", "k3"], [["7", "0.12"]], caption="KL"),
    }
    return parsed(figure(**{**parts, **changes}))  # pyright: ignore[reportArgumentType]


def test_the_heading_names_the_figure() -> None:
    found = framed()
    heading = found.find("figcaption/h3")
    assert heading is not None
    assert heading.text == "KL <to the reference>"
    assert found.get("aria-labelledby") == heading.get("id") == "kl-heading"
    assert found.get("id") == "kl"
    assert [span.text for span in found.findall("figcaption/span")] == ["nats per token", "step 7"]
    assert found.find("div/svg[@id='drawing']") is not None
    assert [p.text for p in found.findall("p")] == ["Grows & falls."]


def test_a_line_of_the_legend_knows_the_columns_of_its_values() -> None:
    (line,) = framed().findall("ul/li")
    values = line.findall("span[@class='value']")
    assert [(value.text, value.get("data-column")) for value in values] == [("0.12", "1"), ("0.34", "2")]
    assert line.findtext("span[@class='label']") == "k3"


def test_the_sample_of_a_band_is_a_box_and_that_of_a_curve_a_line() -> None:
    assert [child.tag for child in parsed(key("band"))] == ["rect"]
    curve = parsed(key("line s2", dot="M0 0"))
    assert [child.get("class") for child in curve] == ["line s2", "dot s2"]
    assert curve.get("aria-hidden") == "true", "the label says the same in words"


def test_the_first_cell_of_a_row_is_its_heading() -> None:
    table = parsed(plain_table(["step", "k3"], [["7", "0.12"], ["8", "<b>"]], caption="KL", classes="wide"))
    assert [cell.text for cell in table.findall("table/thead/tr/th")] == ["step", "k3"]
    rows = table.findall("table/tbody/tr")
    assert [(row.findtext("th"), row.findtext("td")) for row in rows] == [("7", "0.12"), ("8", "<b>")]
    assert all(row.find("th").get("scope") == "row" for row in rows)  # pyright: ignore[reportOptionalMemberAccess]
    assert table.get("aria-label") == "Table: KL"
    assert table.find("table").get("class") == "wide"  # pyright: ignore[reportOptionalMemberAccess]


def test_the_numbers_of_a_chart_are_folded_away_with_a_caption_that_can_be_seen() -> None:
    folded = parsed(data_table(["step", "k3"], [["7", "0.12"]], caption="KL over steps"))
    assert folded.tag == "details"
    assert "open" not in folded.attrib
    caption = folded.find("div/table/caption")
    assert caption is not None
    assert (caption.text, caption.get("class")) == ("KL over steps", None)
    hidden = parsed(plain_table(["a"], [["b"]], caption="c")).find("table/caption")
    assert hidden is not None
    assert hidden.get("class") == "unseen"
