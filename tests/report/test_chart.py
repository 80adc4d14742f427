"""Charts: all of it in words and in a table, and what the script draws it from (tests/browser)."""

from __future__ import annotations

import json
import math

from tests.report.pages import Node, parse

from klamp.report.axes import CurveColumn, Series, columns_of, mean, spread
from klamp.report.chart import Chart, Line, Mark, describe, key, render_chart

STEPS = range(1, 21)


def chart(*series: Series, **changes) -> Chart:
    values = {"name": "chart-x", "title": "Title", "unit": "nats", "text": "Says.", "series": series}
    return Chart(**values | changes)


def rendered(*series: Series, **changes) -> Node:
    return parse(render_chart(chart(*series, **changes)))


def test_what_is_not_finite_stands_in_the_table_and_in_the_words() -> None:
    values = [0.1, 0.2, math.nan, 0.4, math.inf, 0.6, 0.7]
    node = rendered(Series(label="a", points=dict(enumerate(values))))
    cells = [row[1] for row in node.one("table").rows()[1:]]
    assert cells[:5] == ["0.1", "0.2", "NaN", "0.4", "∞"]
    assert "2 values not finite" in node.one("desc").text


def test_curves_differ_in_more_than_colour() -> None:
    lines = [Series(label=str(slot), points=dict.fromkeys(STEPS, 1.0), slot=slot) for slot in range(40)]
    keys = rendered(*lines).one("ul", of="legend").all("path", of="curve")
    looks = [tuple(curve.classes) for curve in keys]
    assert len(set(looks)) == 40
    assert all(looks[slot][2] != looks[slot + 8][2] for slot in range(32))


def test_legend_and_table_hold_the_numbers() -> None:
    a = Series(label="a", points={1: 0.25, 2: 0.123456})
    b = Series(label="b <b>", points={2: -3.0}, slot=1)
    node = rendered(a, b)
    assert [item.text for item in node.one("ul", of="legend").all("li")] == ["a0.1235", "b <b>−3"]
    assert node.one("table").rows() == [["step", "a", "b <b>"], ["1", "0.25", "–"], ["2", "0.123456", "−3"]]
    assert node.one(of="at").text == "last: step 2"
    assert [value.attributes["data-column"] for value in node.all(of="value")] == ["1", "2"]
    assert len(node.all("caption")) == len(node.all("table")) == 1


def test_the_frame_names_its_parts_and_escapes_them() -> None:
    node = rendered(Series(label="a", points={1: 0.25}), title="KL <x>", text="Grows & falls.", name="kl")
    figure, heading = node.one("figure"), node.one("h3")
    assert heading.text == "KL <x>" and heading.attributes["id"] == figure.attributes["aria-labelledby"] == "kl-heading"
    assert figure.attributes["id"] == "kl" and node.one("p", of="says").text == "Grows & falls."
    assert [child.name for child in parse(key("band")).one("svg").children if isinstance(child, Node)] == ["rect"]


def test_curves_of_a_group_share_a_line_of_the_legend() -> None:
    runs = [("a_seed-0", "a", 0.1), ("a_seed-1", "a", 0.2), ("b", "b", 0.3), ("c", "", 0.4)]
    node = rendered(*(Series(label=name, points={1: value}, group=group) for name, group, value in runs))
    items = node.one("ul", of="legend").all("li")
    assert [item.one(of="label").text for item in items] == ["a, mean of 2", "b", "c"]
    shown = [[(each.text, each.attributes["data-column"]) for each in item.all(of="value")] for item in items]
    assert shown == [[("0.15", "1")], [("0.3", "4")], [("0.4", "5")]]
    assert items[0].one(of="span").text == "0.1 to 0.2"
    assert node.one("table").rows()[0] == ["step", "a, mean of 2", "a_seed-0", "a_seed-1", "b", "c"]


def test_the_band_of_a_mean_goes_from_the_lowest_to_the_highest() -> None:
    low, high = dict.fromkeys(STEPS, 0.2), dict.fromkeys(STEPS, 0.4)
    node = rendered(Series(label="a", points=low, group="g"), Series(label="b", points=high, group="g"))
    assert "1 curve. g, mean of 2: 0.3 at step 1" in node.one("desc").text
    assert "Its band goes from 0.2 to 0.4 there." in node.one("desc").text


def test_the_script_is_told_how_to_draw_it() -> None:
    a = Series(label="a", points=dict.fromkeys(range(1000), 0.5), group="g")
    b = Series(label="b", points=dict.fromkeys(range(1000), 1.5), group="g", slot=3)
    made = chart(a, b, lines=[Line(label="t", low=0.1)], marks=[Mark(step=5, number=1, name="x")], include=(0.0,))
    plot = json.loads(parse(render_chart(made, most=100)).one("figure").attributes["data-plot"] or "")
    assert plot["series"] == [
        {"slot": 0, "members": [2, 3]},
        {"slot": 0, "of": 1},
        {"slot": 3, "of": 1},
    ]
    assert (plot["axis"], plot["unit"], plot["include"]) == ("step", "nats", [0.0])
    assert (plot["lines"], plot["marks"]) == ([[0.1, None]], [[5, 1]])
    assert len(plot["means"]) == 50 and plot["means"][0] == [9.5, 1.0, 0.5, 1.5]


def test_who_cannot_see_it_is_told() -> None:
    made = chart(
        Series(label="k3", points={1: 0.0, 2: 0.5, 3: 0.25}),
        lines=[Line(label="target 0.1", low=0.1)],
        marks=[Mark(step=2, number=3, name="kl-spike")],
    )
    assert describe(made) == (
        "Says. 1 curve. k3: 0 at step 1, 0.25 at step 3; lowest 0, highest 0.5 at step 2. target 0.1. "
        "Alarm 3, kl-spike, rose at step 2."
    )
    svg = parse(render_chart(made)).one("svg", of="chart")
    assert svg.attributes["role"] == "img"
    assert [svg.one(id=name).name for name in (svg.attributes["aria-labelledby"] or "").split()] == ["title", "desc"]
    assert svg.one("title").text == "Title"


def test_targets_and_bands_are_in_the_legend() -> None:
    lines = [Line(label="band", low=0.05, high=0.15), Line(label="target", low=0.3)]
    node = rendered(Series(label="k3", points=dict.fromkeys(STEPS, 0.1)), lines=lines)
    assert [item.text for item in node.one("ul", of="legend").all("li")] == ["k30.1", "band", "target"]


def test_long_runs_are_thinned_and_say_so() -> None:
    points = {step: math.sin(step / 50) for step in range(1, 5001)}
    node = parse(render_chart(chart(Series(label="a", points=points)), most=100))
    rows = node.one("table").rows()
    assert 80 <= len(rows) <= 210
    assert f"; {len(rows) - 1} of 5000 logged steps, the extremes among them" in node.one("caption").text


def series(label: str, group: str, points: dict[float, float]) -> Series:
    return Series(label=label, points=points, group=group)


def test_a_mean_stands_before_its_runs() -> None:
    a, b = series("a0", "a", {1: 0.0, 2: 2.0}), series("a1", "a", {1: 1.0, 2: 4.0})
    alone = series("b0", "b", {1: 9.0})
    found = columns_of([a, alone, b])
    assert [column.series.label for column in found] == ["a, mean of 2", "a0", "a1", "b0"]
    assert [(column.members, column.of) for column in found] == [((2, 3), None), ((), 1), ((), 1), ((), None)]
    assert found[0].series.points == {1: 0.5, 2: 3.0}
    assert spread(found, found[0]) == {1: (0.0, 1.0), 2: (2.0, 4.0)}
    assert spread(found, found[3]) == {}


def test_a_mean_is_of_all_its_runs_or_none_and_runs_without_a_group_stay_alone() -> None:
    long, short = series("a", "g", {1: 1.0, 2: 1.0, 3: 1.0}), series("b", "g", {1: 3.0, 2: math.nan})
    assert mean([long, short]) == {1: 2.0}, "it does not jump where one run ends"
    apart = [series("a", "g", {1: 1.0}), series("b", "g", {2: 1.0})]
    assert columns_of(apart) == [CurveColumn(series=each) for each in apart]
    assert mean([series("a", "g", {1: 1e308}), series("b", "g", {1: 1.7e308})]) == {1: 1e100}
    assert [column.of for column in columns_of([series("a", "", {1: 1.0}), series("b", "", {1: 1.0})])] == [None, None]
