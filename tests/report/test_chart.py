"""Charts: all of it in words and in a table, and what the script draws it from (tests/browser)."""

import json
import math

from tests.report.pages import Node, parse, run_of

from klamp.report.charts import Chart, Line, Mark, Series, describe, key, plans, render_chart, thin

STEPS = range(1, 21)


def chart(*series: Series, **changes) -> Chart:
    values = {"name": "chart-x", "title": "Title", "unit": "nats", "curves": {}, "text": "Says.", "series": series}
    return Chart(**values | changes)


def rendered(*series: Series, **changes) -> Node:
    return parse(render_chart(chart(*series, **changes)))


def test_no_title_repeats_its_unit() -> None:
    made = [(plan.title, plan.unit) for plan in plans([run_of(reward=[1.0])])]
    assert {"Loss", "Reward", "Gradient norm"} <= {title for title, unit in made if not unit}
    assert not [title for title, unit in made if unit and unit in title.lower()]
    assert rendered(Series(label="a", points={1: 1.0}), title="Loss", unit="").one("caption").text == "Loss"


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


def test_the_frame_names_its_parts_and_escapes_them() -> None:
    node = rendered(Series(label="a", points={1: 0.25}), title="KL <x>", text="Grows & falls.", name="kl")
    figure, heading = node.one("figure"), node.one("h3")
    assert heading.text == "KL <x>" and heading.attributes["id"] == figure.attributes["aria-labelledby"] == "kl-heading"
    assert figure.attributes["id"] == "kl" and node.one("p", of="says").text == "Grows & falls."
    assert [child.name for child in parse(key("band")).one("svg").children if isinstance(child, Node)] == ["rect"]


def test_who_cannot_see_it_is_told() -> None:
    made = chart(
        Series(label="k3", points={1: 0.0, 2: 0.5, 3: 0.25}),
        lines=[Line(label="target 0.1", low=0.1)],
        marks=[Mark(step=2, number=3, name="kl-spike")],
    )
    assert describe(made).startswith("Says. k3: 0 at step 1. k3: 0.25 at step 3. target 0.1. Alarm 3, kl-spike")
    svg = parse(render_chart(made)).one("svg", of="chart")
    assert svg.attributes["role"] == "img"
    assert [svg.one(id=name).name for name in (svg.attributes["aria-labelledby"] or "").split()] == ["title", "desc"]
    assert svg.one("title").text == "Title"


def test_long_runs_are_thinned_and_say_so() -> None:
    points = {step: math.sin(step / 50) for step in range(1, 5001)}
    node = parse(render_chart(chart(Series(label="a", points=points)), most=100))
    rows = node.one("table").rows()
    assert 80 <= len(rows) <= 210
    assert f"; {len(rows) - 1} of 5000 logged steps, the extremes among them" in node.one("caption").text


def test_curves_of_a_group_share_a_line_of_the_legend() -> None:
    runs = [("a_seed-0", "a", 0.1), ("a_seed-1", "a", 0.2), ("b", "b", 0.3), ("c", "", 0.4)]
    node = rendered(*(Series(label=name, points={1: value}, group=group) for name, group, value in runs))
    items = node.one("ul", of="legend").all("li")
    assert [item.one(of="label").text for item in items] == ["a, 2 runs", "b", "c"]
    assert [[each.text for each in item.all(of="value")] for item in items] == [["0.1", "0.2"], ["0.3"], ["0.4"]]
    assert node.one("table").rows()[0] == ["step", "a_seed-0", "a_seed-1", "b", "c"]


def test_the_script_gets_what_the_table_lacks() -> None:
    series = [Series(label=name, points=dict.fromkeys(range(9), 0.5), slot=slot) for name, slot in (("a", 0), ("b", 3))]
    made = chart(*series, lines=[Line(label="t", low=0.1)], marks=[Mark(step=5, number=1, name="x")], include=(0.0,))
    plot = json.loads(parse(render_chart(made)).one("figure").attributes["data-plot"] or "")
    lines, marks = [[0.1, None]], [[5, 1]]
    rest = {"unit": "nats", "include": [0.0], "decimals": None, "slots": [0, 3]}
    assert plot == {**rest, "lines": lines, "marks": marks}


def test_short_curves_stay_and_long_ones_lose_points_but_no_extreme() -> None:
    assert thin([{1: 0.0, 2: 1.0}, {2: 0.0, 5: 0.0}], most=10) == [1, 2, 5]
    curve = {step: math.sin(step / 500) for step in range(1, 10001)}
    curve[7321] = 100.0
    curve[123] = -100.0
    other = dict.fromkeys(curve, 0.5) | {5000: math.nan}
    kept = thin([curve, other], most=200)
    assert {1, 10000, 7321, 123, 5000} <= set(kept)
    assert 100 <= len(kept) <= 2 * 200 + 10
    assert kept == sorted(kept)
    shown = [curve[step] for step in kept if step not in (7321, 123)]
    assert max(shown) == max(value for step, value in curve.items() if step != 7321)
