"""The picture of a sweep, read back from the figure: seeds, means, intervals, and where each arm stands."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ablation.figures import labels, means, points, whiskers
from tests.ablation.outcomes import failed, outcome, sweep

from klamp.ablation.sweep_picture import draw_sweep, places

BETAS = [{"beta": 0.0}, {"beta": 0.001}, {"beta": 0.01}, {"beta": 0.1}]
ESTIMATORS = [
    {"kl_estimator": name, "kl_placement": where} for name in ("k1", "k2", "k3") for where in ("loss", "reward")
]


def test_the_sweep_shows_every_seed_and_the_mean_with_its_interval() -> None:
    runs = sweep(BETAS)
    figure = draw_sweep(runs)
    assert figure is not None
    skill, kl, retained = figure.axes
    scores = [[run.after["addition"] for run in runs if run.values["beta"] == beta] for beta in (0.0, 0.001, 0.01, 0.1)]
    assert np.allclose(points(skill)[:, 1], np.concatenate(scores))
    beside = np.repeat([-4, -3, -2, -1], 3) - points(skill)[:, 0]
    assert (beside > 0).all() and (beside < 0.1).all(), "every seed stands a little beside its mean"
    assert [y for _, y in means(skill)] == pytest.approx([sum(ys) / 3 for ys in scores])
    assert np.allclose(whiskers(skill), [(min(ys), max(ys)) for ys in scores])
    assert [tick.get_text() for tick in skill.get_xticklabels()] == ["0", "0.001", "0.01", "0.1"]
    assert skill.get_legend() is None
    assert [text.get_text() for text in skill.texts] == ["//", "before training"]
    assert labels(kl) == ["KL(policy‖start)", "KL(start‖policy)"]
    assert len(points(kl)) == 24
    assert retained.get_title() == "retained skills: subtraction, reversal"
    assert (skill.get_ylabel(), kl.get_ylabel()) == ("score after training", "nats per token")


def test_the_line_of_means_does_not_reach_beta_zero() -> None:
    figure = draw_sweep(sweep(BETAS))
    assert figure is not None
    (line,) = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 3]
    assert list(line.get_xdata()) == pytest.approx([-3, -2, -1])


def test_other_sweeps_list_their_arms() -> None:
    runs = sweep(ESTIMATORS)
    figure = draw_sweep(runs)
    assert figure is not None
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert names[0] == "kl_estimator=k1 kl_placement=loss"
    assert len(names) == 6
    drawn = points(figure.axes[0])
    assert np.allclose(drawn[:, 0], [run.after["addition"] for run in runs])
    assert np.allclose(drawn[:, 1].round(), [i // 3 for i in range(len(runs))])


def test_a_sweep_of_betas_and_something_else_has_a_line_for_each_and_one_legend() -> None:
    arms = [{"beta": beta, "kl_estimator": name} for name in ("k1", "k3") for beta in (0.01, 0.1)]
    figure = draw_sweep(sweep(arms))
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes][1] == "KL(policy‖start)", "one direction only"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["kl_estimator=k1", "kl_estimator=k3"]
    places = np.array([x for x, _ in means(figure.axes[0])]).reshape(2, 2)
    assert np.allclose(places[0] - places[1], places[0, 0] - places[1, 0]), "moved apart by the same"
    assert 0 < abs(places[0, 0] - places[1, 0]) < 0.2


def test_a_measure_that_no_run_has_is_left_out() -> None:
    runs = [outcome(f"{b}", values={"beta": b}, numbers={}, before={}, after={"addition": b}) for b in (0.1, 0.2)]
    figure = draw_sweep(runs)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["RL skill: addition"]
    assert [text.get_text() for text in figure.axes[0].texts] == [], "no score before training is known"


def test_a_kl_over_decades_is_drawn_on_a_logarithmic_axis() -> None:
    runs = [outcome(f"{b}", values={"beta": b}, numbers={"kl/reverse": b}) for b in (0.001, 0.01, 1.0)]
    figure = draw_sweep(runs)
    assert figure is not None
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log", "linear"]


def test_without_any_number_there_is_no_picture() -> None:
    assert draw_sweep([]) is None
    assert draw_sweep([failed()]) is None
    assert draw_sweep([outcome(after={}, before={}, numbers={})]) is None


def test_beta_zero_stands_apart_on_a_logarithmic_axis() -> None:
    found = places({f"beta={b}": {"beta": b} for b in (0.1, 0.0, 0.001, 0.01)})
    at = {arm: place for arm, (_, place) in found.of.items()}
    assert found.over_beta
    assert found.lines == ("",)
    assert [at[f"beta={b}"] for b in (0.001, 0.01, 0.1)] == pytest.approx([-3, -2, -1])
    assert at["beta=0.0"] == pytest.approx(-4)
    assert found.gap == pytest.approx(-3.5)
    assert found.ticks == {-4: "0", -3: "0.001", -2: "0.01", -1: "0.1"}


def test_other_fields_become_lines_over_beta_and_too_many_of_them_a_list() -> None:
    two = places({f"{b} {e}": {"beta": b, "kl_estimator": e} for e in ("k2", "k3") for b in (0.0, 0.1)})
    assert two.over_beta
    assert two.lines == ("kl_estimator=k2", "kl_estimator=k3")
    assert two.of["0.1 k3"] == ("kl_estimator=k3", -1)
    many = places({f"{b} {i}": {"beta": b, "kl_clip_threshold": i} for i in range(7) for b in (0.0, 0.1)})
    assert not many.over_beta
    assert len(many.ticks) == 14
    assert not places({"a": {"beta": 0.1}, "b": {"beta": 0.1, "kl_estimator": "k1"}}).over_beta, "one beta is no axis"
    assert not places({"a": {"beta": 0.1}, "b": {}}).over_beta, "an arm without a beta has no place on it"
