"""Which charts a run gets."""

from __future__ import annotations

from tests.report.pages import run_of

from klamp.diagnostics.history import Settings
from klamp.diagnostics.metrics import METRICS
from klamp.report.alarm_section import numbered
from klamp.report.curves import PLANS, charts


def test_every_curve_is_a_metric() -> None:
    names = {name for plan in PLANS for name in plan.curves}
    assert names <= METRICS.keys()
    assert len({plan.name for plan in PLANS}) == len(PLANS)


def test_one_run_has_all_metrics_of_a_plan_in_one_chart() -> None:
    run = run_of(k1=[0.1, 0.2], k3=[0.1, 0.3], reward=[0.5, 0.6], beta=[0.1, 0.1])
    found = {chart.name: [series.label for series in chart.series] for chart in charts([run], numbered([run]))}
    assert found == {"chart-reward": ["reward"], "chart-kl": ["k3", "k1"], "chart-beta": ["beta"]}


def test_a_metric_keeps_its_colour_whatever_else_is_logged() -> None:
    (alone,) = charts([run_of(k1=[0.0])], {})
    (both,) = charts([run_of(k1=[0.0], exact=[0.0])], {})
    assert alone.series[0].slot == both.series[1].slot == 2


def test_skills_are_kept_apart_and_the_trained_one_is_named() -> None:
    scores = [(0, {"addition": 0.5, "reversal": 1.0}), (2, {"addition": 0.9, "reversal": 0.8})]
    run = run_of(scores=scores, settings=Settings(rl_skill="addition"))
    (chart,) = charts([run], numbered([run]))
    assert [series.label for series in chart.series] == ["addition (trained)", "reversal"]
    assert chart.series[1].points == {0: 100.0, 2: 80.0} and chart.include == (0.0, 100.0)
    assert [(mark.step, mark.number, mark.name) for mark in chart.marks] == [(2, 1, "retention")]


def test_scores_above_1_stay_as_they_are() -> None:
    (chart,) = charts([run_of(scores=[(0, {"a": 0.5}), (2, {"a": 12.5})])], {})
    assert (chart.unit, chart.include, chart.series[0].points) == ("score", (0.0,), {0: 0.5, 2: 12.5})


def test_alarms_are_marked_where_their_metrics_are() -> None:
    run = run_of(k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7], reward=[0.5] * 7, length=[4] * 7)
    marks = {chart.name: [mark.name for mark in chart.marks] for chart in charts([run], numbered([run]))}
    assert marks == {"chart-kl": ["kl-spike"], "chart-reward": [], "chart-length": []}


def test_notes_are_not_marked() -> None:
    run = run_of(k3=[0.0] + [0.25] * 9)
    assert [finding.alarm.level for finding in run.diagnosis.findings] == ["note"]
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
            run_of(name=n, k3=[0.1], details={"config": {"target_kl": t, "kl_controller": "step"}})
            for n, t in (("a", 0.1), ("b", other))
        ]
        return [[line.label for line in chart.lines] for chart in charts(runs, {})]

    assert both(0.1) == [["beta rests from 0.05 to 0.15", "target 0.1"]]
    assert both(0.2) == [[]]


def test_the_arms_without_a_curve_of_the_kl_are_named_once() -> None:
    free = [run_of(name=f"free_seed-{n}", reward=[0.5], details={"kl_after": 0.6, "group": "free"}) for n in (0, 1)]
    runs = [*free, run_of(name="held", reward=[0.5], k3=[0.1], kl__log_ratio_max=[2.0], details={"kl_after": 0.1})]
    said = {chart.title: chart.text for chart in charts(runs, {})}
    assert said["KL to the reference: k3"].endswith(" No curve of free: measured after training, see Overview.")
    assert [title for title, text in said.items() if "No curve of" in text] == ["KL to the reference: k3"]


def test_scores_have_the_decimals_that_they_have_everywhere() -> None:
    decimals = {chart.title: chart.decimals for chart in charts([run_of(k3=[0.0], scores=[(0, {"a": 0.5})])], {})}
    assert decimals == {"KL to the reference": None, "Skills on held-out prompts": 1}
