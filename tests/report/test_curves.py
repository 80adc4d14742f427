"""The charts of the page, with targets."""

from typing import Any

import pytest
from tests.report.pages import run_of

from klamp.config.kl import STEP_FACTORS
from klamp.core.controllers import StepController
from klamp.doctor.history import RunSettings
from klamp.doctor.metrics import METRICS
from klamp.report.alarm_section import numbered
from klamp.report.charts import TITLES, anchor_curves, charts, levels_of
from klamp.report.run import OURS

FACTORS = [*STEP_FACTORS]
STEPPED = {"target_kl": 0.1, "kl_controller": "step", "kl_controller_factors": FACTORS}


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
    assert [(s.label, s.points) for s in found["chart-anchors"].series] == [
        ("reference (k3)", {1: 0.0, 2: 0.3}),
        ("teacher", {1: 0.4, 2: 0.3}),
    ]
    assert [(s.label, s.points[2]) for s in found["chart-beta"].series] == [("beta", 0.1), ("teacher_coef", 0.5)]

    each = {"teacher__kl.math": [0.5], "teacher__kl.code": [0.3], "teacher__kl": [0.4], "sampler__k3": [0.0]}
    found = list(anchor_curves([run_of(**each)]).values())
    assert found == ["reference (k3)", "teachers, mean", "teacher code", "teacher math", "sampler (k3)"]
    near = run_of(policy__kl_old=[0.1], sampler__k3=[0.0], details={"config": {"reference": "sampler"}})
    (chart,) = (chart for chart in charts([near], {}) if chart.name == "chart-anchors")
    assert [s.label for s in chart.series] == ["sampler (k3), at the last update", "sampler (k3)"]
    runs = [run_of(name="a", **taught), run_of(name="b", k3=[0.0])]
    assert [c.title for c in charts(runs, {}) if c.name.startswith("chart-anchors")] == [
        "Divergence from each anchor: teacher"
    ]
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
    assert len({chart.name for chart in charts(runs, {})}) == 3


def test_a_target_is_drawn_where_all_runs_have_it() -> None:
    def both(other: float) -> list[list[str]]:
        runs = [
            run_of(name=n, k3=[0.1], details={"config": {**STEPPED, "target_kl": t}})
            for n, t in (("a", 0.1), ("b", other))
        ]
        return [[line.label for line in chart.lines] for chart in charts(runs, {})]

    assert both(0.1) == [["beta rests from 0.05 to 0.15", "target 0.1"]]
    assert both(0.2) == [[]]


def lines(chart: str, curves: dict[str, list[float]] | None = None, **config: Any) -> list[tuple[float, float | None]]:
    run = run_of(details={"config": config}, k3=[0.1], **curves or {})
    return [(line.low, line.high) for line in levels_of(run, chart)]


def test_a_target_with_the_band_of_its_controller() -> None:
    band = [(pytest.approx(0.05), pytest.approx(0.15)), (0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="step", kl_controller_factors=FACTORS) == band
    factors = [2.0, 0.5, 1.2, 0.8]
    own = lines("kl", target_kl=0.1, kl_controller="step", kl_controller_factors=factors)
    assert own == [(pytest.approx(0.08), pytest.approx(0.12)), (0.1, None)]
    assert lines("kl", target_kl=0.1) == [(0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="proportional") == [(0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="step", kl_controller_factors=FACTORS, beta=0.0) == [(0.1, None)]
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
