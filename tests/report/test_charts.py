"""Charts: what is on them, in words and in a table, and what the script draws them from (tests/browser)."""

import json
import math
from typing import Any

import pytest
from tests.report.pages import Node, parse, run_of

from klamp.config.kl import STEP_FACTORS
from klamp.core.controllers import StepController
from klamp.doctor.history import RunSettings
from klamp.doctor.metrics import METRICS
from klamp.report.alarm_section import numbered
from klamp.report.charts import (
    TITLES,
    Chart,
    Line,
    Mark,
    Series,
    anchor_curves,
    charts,
    describe,
    key,
    levels_of,
    plans,
    render_chart,
    thin,
)
from klamp.report.run import OURS

STEPS = range(1, 21)


def chart(*series: Series, **changes) -> Chart:
    values = {"name": "chart-x", "title": "Title", "unit": "nats", "curves": {}, "text": "Says.", "series": series}
    return Chart(**values | changes)


def rendered(*series: Series, **changes) -> Node:
    return parse(render_chart(chart(*series, **changes)))


def test_no_title_repeats_its_unit() -> None:
    made = {plan.title: plan.unit for plan in plans([run_of(reward=[1.0])])}
    assert made["Loss"] == made["Reward"] == made["Gradient norm"] == ""
    assert not [title for title, unit in made.items() if unit and unit in title.lower()]
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
    drawn = {"lines": [[0.1, None]], "marks": [[5, 1]]}
    assert plot == {"unit": "nats", "include": [0.0], "decimals": None, "slots": [0, 3], **drawn}


def test_short_curves_stay_and_long_ones_lose_points_but_no_extreme() -> None:
    assert thin([{1: 0.0, 2: 1.0}, {2: 0.0, 5: 0.0}], most=10) == [1, 2, 5]
    curve = {step: math.sin(step / 500) for step in range(1, 10001)} | {7321: 100.0, 123: -100.0}
    other = dict.fromkeys(curve, 0.5) | {5000: math.nan}
    kept = thin([curve, other], most=200)
    assert {1, 10000, 7321, 123, 5000} <= set(kept)
    assert 100 <= len(kept) <= 2 * 200 + 10 and kept == sorted(kept)
    shown = [curve[step] for step in kept if step not in (7321, 123)]
    assert max(shown) == max(value for step, value in curve.items() if step != 7321)


STEPPED = {"target_kl": 0.1, "kl_controller": "step", "kl_controller_factors": [*STEP_FACTORS]}


def test_every_metric_with_a_chart_is_on_the_page_and_a_chart_has_one_unit() -> None:
    units: dict[str, set[str]] = {}
    for row in METRICS.values():
        assert row.shown.keys() <= {"chart", "label", "column"}
        units.setdefault(row.shown.get("chart", ""), set()).add(row.unit)
    assert units.keys() - {""} >= TITLES.keys() - {"retention", "anchors"}
    assert all(len(found) == 1 for chart, found in units.items() if chart)


def test_one_run_has_all_metrics_of_a_plan_in_one_chart_each_in_its_colour_whatever_else_is_logged() -> None:
    run = run_of(k1=[0.1, 0.2], k3=[0.1, 0.3], reward=[0.5, 0.6], beta=[0.1, 0.1])
    found = {chart.name: [series.label for series in chart.series] for chart in charts([run], numbered([run]))}
    assert found == {"chart-reward": ["reward"], "chart-kl": ["k3", "k1"], "chart-beta": ["beta"]}
    (alone,) = charts([run_of(k1=[0.0])], {})
    (both,) = charts([run_of(k1=[0.0], exact=[0.0])], {})
    assert alone.series[0].slot == both.series[1].slot == 2


def test_a_chart_says_what_klamp_measured_and_nothing_of_another_trainers_numbers() -> None:
    curves = {"k3": [0.1, 0.3], "exact": [0.2, 0.2], "length__truncated": [0.0, 0.5]}
    ours, theirs = (run_of(source=source, **curves) for source in (OURS, "TRL's trainer_state.json"))
    kl, cut = (chart.text for chart in charts([ours], numbered([ours])))
    assert METRICS["kl/exact"].text in kl and METRICS["kl/k3"].text in kl and METRICS["length/truncated"].text in cut
    assert [chart.text for chart in charts([theirs], numbered([theirs]))] == ["", ""]


def test_with_a_teacher_or_the_sampler_as_anchor_each_kl_is_a_curve_by_its_name() -> None:
    taught = {"teacher__kl": [0.4, 0.3], "teacher__coef": [1.0, 0.5], "beta": [0.1, 0.1]}
    found = {chart.name: chart for chart in charts([run_of(k1=[0.0, 0.2], k3=[0.0, 0.3], **taught)], {})}
    points = {s.label: s.points for s in found["chart-anchors"].series}
    assert points == {"reference (k3)": {1: 0.0, 2: 0.3}, "teacher": {1: 0.4, 2: 0.3}}
    assert [(s.label, s.points[2]) for s in found["chart-beta"].series] == [("beta", 0.1), ("teacher_coef", 0.5)]

    each = {"teacher__kl.math": [0.5], "teacher__kl.code": [0.3], "teacher__kl": [0.4], "sampler__k3": [0.0]}
    found = list(anchor_curves([run_of(**each)]).values())
    assert found == ["reference (k3)", "teachers, mean", "teacher code", "teacher math", "sampler (k3)"]
    near = run_of(policy__kl_old=[0.1], sampler__k3=[0.0], details={"config": {"reference": "sampler"}})
    (chart,) = (chart for chart in charts([near], {}) if chart.name == "chart-anchors")
    assert [s.label for s in chart.series] == ["sampler (k3), at the last update", "sampler (k3)"]
    runs = [run_of(name="a", **taught), run_of(name="b", k3=[0.0])]
    titles = [c.title for c in charts(runs, {}) if c.name.startswith("chart-anchors")]
    assert titles == ["Divergence from each anchor: teacher"]
    assert anchor_curves([run_of(k3=[0.1], sampler__k3=[0.0])]) == {}


def test_skills_are_kept_apart_the_trained_one_is_named_and_scores_above_1_stay_as_they_are() -> None:
    scores = [(0, {"addition": 0.5, "reversal": 1.0}), (2, {"addition": 0.9, "reversal": 0.8})]
    run = run_of(scores=scores, settings=RunSettings(rl_skill="addition"))
    (chart,) = charts([run], numbered([run]))
    assert [series.label for series in chart.series] == ["addition (trained)", "reversal"]
    assert chart.series[1].points == {0: 100.0, 2: 80.0} and chart.include == (0.0, 100.0)
    assert [(mark.step, mark.number, mark.name) for mark in chart.marks] == [(2, 1, "retention")]

    (chart,) = charts([run_of(scores=[(0, {"a": 0.5}), (2, {"a": 12.5})])], {})
    assert (chart.unit, chart.include, chart.series[0].points) == ("score", (0.0,), {0: 0.5, 2: 12.5})


def test_alarms_and_no_notes_are_marked_where_their_metrics_are() -> None:
    run = run_of(k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7], reward=[0.5] * 7, length=[4] * 7)
    marks = {chart.name: [mark.name for mark in chart.marks] for chart in charts([run], numbered([run]))}
    assert marks == {"chart-kl": ["kl-spike"], "chart-reward": [], "chart-length": []}
    run = run_of(k3=[0.0] + [0.25] * 9)
    assert [finding.alarm.level for finding in run.diagnosis.findings] == ["note"], "which is not marked"
    assert [chart.marks for chart in charts([run], numbered([run]))] == [[]]


def test_several_runs_have_a_chart_per_metric_and_a_curve_per_run() -> None:
    runs = [run_of(name="a", k1=[0.1], k3=[0.2]), run_of(name="b", k3=[0.3, 0.4]), run_of(name="c", reward=[1.0])]
    found = {chart.title: [(s.label, s.slot, s.points) for s in chart.series] for chart in charts(runs, {})}
    assert found == {
        "Reward": [("c", 2, {1: 1.0})],
        "KL to the reference: k3": [("a", 0, {1: 0.2}), ("b", 1, {1: 0.3, 2: 0.4})],
        "KL to the reference: k1": [("a", 0, {1: 0.1})],
    }


def test_a_target_is_drawn_where_all_runs_have_it() -> None:
    for other, labels in ((0.1, ["beta rests from 0.05 to 0.15", "target 0.1"]), (0.2, [])):
        configs = (STEPPED, STEPPED | {"target_kl": other})
        (made,) = charts([run_of(k3=[0.1], details={"config": config}) for config in configs], {})
        assert [line.label for line in made.lines] == labels


def lines(chart: str, curves: dict[str, list[float]] | None = None, **config: Any) -> list[tuple[float, float | None]]:
    run = run_of(details={"config": config}, k3=[0.1], **curves or {})
    return [(line.low, line.high) for line in levels_of(run, chart)]


def test_a_target_with_the_band_of_its_controller() -> None:
    band = [(pytest.approx(0.05), pytest.approx(0.15)), (0.1, None)]
    assert lines("kl", **STEPPED) == band
    own = lines("kl", **STEPPED | {"kl_controller_factors": [2.0, 0.5, 1.2, 0.8]})
    assert own == [(pytest.approx(0.08), pytest.approx(0.12)), (0.1, None)]
    for without in ({"target_kl": 0.1}, STEPPED | {"kl_controller": "proportional"}, STEPPED | {"beta": 0.0}):
        assert lines("kl", **without) == [(0.1, None)]
    assert lines("kl", target_kl=None) == lines("reward", target_kl=0.1) == []


@pytest.mark.parametrize(("kl", "rests"), [(0.051, True), (0.149, True), (0.049, False), (0.151, False)])
def test_in_the_band_beta_does_rest(kl: float, rests: bool) -> None:
    run = run_of(details={"config": STEPPED}, k3=[0.1])
    (band,) = [line for line in levels_of(run, "kl") if line.high is not None]
    controller = StepController(1.0, target=0.1)
    assert (controller.update(kl) == 1.0) is rests is (band.low <= kl <= (band.high or 0))


def test_the_alarm_of_the_sampler_needs_no_configuration() -> None:
    assert lines("sampler", {"sampler__k3": [0.0]}) == [(0.01, None)]
    assert lines("sampler", {"sampler__abs": [0.0]}) == []
