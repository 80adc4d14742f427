"""The pictures of an ablation: what is drawn where, read back from the figures; and that nothing makes them fail."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread
from tests.ablation.figures import labels, means, points, whiskers
from tests.ablation.outcomes import BEFORE, failed, outcome, sweep

from klamp.ablation.pictures import (
    COLOURS,
    LONGEST_NAME,
    Points,
    draw_courses,
    draw_frontier,
    draw_points,
    draw_sweep,
    join_means,
    named,
    new_figure,
    places,
    save,
    show_decades,
    style,
    tidy,
    wants_logarithm,
    write_pictures,
)
from klamp.ablation.statistics import bootstrap_interval

FORMATS = (".png", ".pdf", ".svg")
BETAS = [{"beta": 0.0}, {"beta": 0.001}, {"beta": 0.01}, {"beta": 0.1}]


def test_courses_are_means_with_a_band_and_beta_zero_has_a_mark_for_its_kl() -> None:
    runs = sweep(BETAS[:2], steps=5)
    figure = draw_courses(runs)
    assert figure is not None
    reward, kl, length = figure.axes
    of_arm = [[run.by_step["reward"] for run in runs[i : i + 3]] for i in (0, 3)]
    for line, seeds in zip(reward.lines, of_arm, strict=True):
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
        assert list(line.get_ydata()) == pytest.approx(list(np.mean(seeds, axis=0)))
    for band, seeds in zip(reward.collections, of_arm, strict=True):
        drawn = band.get_paths()[0].vertices[:, 1]
        assert (min(drawn), max(drawn)) == pytest.approx((np.min(seeds), np.max(seeds)))
    assert [len(line.get_xdata()) for line in kl.lines] == [1, 5]
    assert (kl.lines[0].get_xdata()[0], kl.lines[0].get_marker()) == (5, "o"), "after the last step"
    assert kl.lines[0].get_ydata()[0] == pytest.approx(np.mean([run.numbers["kl/reverse"] for run in runs[:3]]))
    assert kl.get_title() == "mark: exact, after training (none was logged)" and reward.get_title() == ""
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["beta=0.0", "beta=0.001"], "every arm"
    assert (kl.get_ylabel(), length.get_ylabel()) == ("KL, k3 (nats/token)", "length (tokens)")


def test_what_an_arm_has_nothing_of_is_said() -> None:
    course = {"step": [1, 2], "reward": [0.1, 0.2], "kl/k3": [0.1, 0.2]}
    figure = draw_courses([outcome("a", by_step=course), outcome("b", by_step={"step": [1, 2]}, numbers={})])
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["no data: b", "no data: b"]
    every = draw_courses([outcome("a", by_step={"step": [1, 2], "reward": [0.1, 0.2]})])
    assert every is not None and len(every.axes) == 2, "the KL of beta 0 alone is a panel too"


def test_a_course_keeps_to_the_steps_that_most_seeds_have() -> None:
    runs = [
        outcome(seed=0, by_step={"step": [1, 2, 3], "reward": [0.1, 0.2, 0.3]}),
        outcome(seed=1, by_step={"step": [1, 2], "reward": [0.3, None]}),
    ]
    figure = draw_courses(runs)
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1]
    assert list(line.get_ydata()) == pytest.approx([0.2])


HARD = {
    "one arm, one seed": [outcome(by_step={"step": [1], "reward": [0.5], "kl/k3": [None], "length": [math.nan]})],
    "no retained skills": [outcome(arm, after={"addition": 0.5}, before={"addition": 0.4}) for arm in "ab"],
    "no numbers": [outcome(arm, numbers={}, values={"beta": b}) for arm, b in (("a", 0.0), ("b", 0.1))],
    "numbers that are not finite": [
        outcome(seed=i, numbers={"kl/reverse": kl}) for i, kl in enumerate((math.nan, math.inf, 0.1))
    ],
    "a KL of nothing": [outcome(a, values={"beta": b}, numbers={"kl/reverse": 0.0}) for a, b in (("a", 0.0), ("b", 1))],
    "the same everywhere": [outcome(arm, i, values={"beta": float(arm)}) for arm in ("0.1", "0.2") for i in range(3)],
    "one arm failed": [*sweep(BETAS[:2]), failed("beta=9", 0)],
    "a KL over six decades": [
        outcome(f"{k}", values={"beta": k}, numbers={"kl/reverse": k}) for k in (1e-6, 1e-3, 1.0)
    ],
    "twelve arms": sweep(
        [{"kl_clip_threshold": 0.1 * i, "kl_clip_method": "soft_and_a_very_long_name"} for i in range(12)]
    ),
    "names that are no names": [
        outcome(arm, by_step={"step": [1, 2], "reward": [1, 2]}) for arm in ("$x$", "_a", "", "a$")
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_nothing_makes_them_fail(name: str, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    written = write_pictures(HARD[name], tmp_path)
    assert "sweep.png" in [file.name for file in written]
    assert {file.suffix for file in written} == {".png", ".pdf", ".svg"}
    for file in (each for each in written if each.suffix == ".png"):
        image = imread(file)
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.02, "something was drawn"
    assert dict(mpl.rcParams) == before, "no global state"


def test_without_a_run_that_was_done_there_is_no_picture(tmp_path: Path) -> None:
    assert write_pictures([], tmp_path) == ()
    assert write_pictures([failed()], tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_all_three_are_written(tmp_path: Path) -> None:
    written = write_pictures(sweep(BETAS), tmp_path)
    names = [f"{name}{ending}" for name in ("frontier", "sweep", "courses") for ending in FORMATS]
    assert [file.name for file in written] == names
    assert all(file.stat().st_size > 10_000 for file in written)


def test_the_frontier_is_every_skill_against_the_kl_of_a_completion() -> None:
    runs = [
        outcome(arm, seed, numbers={"kl/reverse_sequence": kl}, after={**BEFORE, "addition": score})
        for arm, seed, kl, score in (("free", 0, 3.0, 0.9), ("free", 1, 5.0, 1.0), ("held", 0, 0.5, 0.7))
    ]
    figure = draw_frontier([*runs, failed()])
    assert figure is not None
    trained, *others = figure.axes
    assert [axes.get_title() for axes in figure.axes] == [
        "addition (trained)",
        "subtraction (not trained)",
        "reversal (not trained)",
    ]
    assert points(trained) == pytest.approx(np.array([(3, 0.9), (5, 1.0), (4, 0.95), (0.5, 0.7), (0.5, 0.7)]))
    assert list(trained.lines[0].get_ydata()) == [BEFORE["addition"]] * 2, "the score before training"
    assert trained.get_xlabel() == "KL(policy‖start) (nats/sequence)" and len(others) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["free", "held"]


def test_without_a_kl_of_completions_there_is_no_frontier() -> None:
    assert draw_frontier([outcome(), failed()]) is None


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


def test_twelve_arms_look_different_from_each_other() -> None:
    assert len({style(i) for i in range(12)}) == 12
    assert len({(look.colour, look.mark) for look in map(style, range(12))}) == 12
    assert len({(look.colour, look.dashes) for look in map(style, range(12))}) == 12
    assert len(set(COLOURS)) == len(COLOURS)


def test_eighty_four_arms_look_different() -> None:
    assert len({style(i) for i in range(84)}) == 84
    assert style(84) == style(0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("beta=0.1", "beta=0.1"), ("", "(no name)"), ("_private", "\u200b_private"), ("a$b$", r"a\$b\$")],
)
def test_a_name_is_shown_as_it_is_written(text: str, shown: str) -> None:
    assert named(text) == shown


def test_a_long_name_keeps_both_of_its_ends() -> None:
    text = "start-" + "x" * LONGEST_NAME + "-end"
    short = named(text)
    assert len(short) == LONGEST_NAME
    assert short.startswith("start-") and short.endswith("-end") and "…" in short


VALUES = {1.0: (0.2, 0.4, 0.9), 2.0: (0.5,)}


def test_the_mean_has_its_interval_and_every_seed_a_point_beside_it() -> None:
    axes = new_figure(3, 2).subplots()
    draw_points(axes, Points(label="k1", look=style(0), at=VALUES), confidence=0.95, aside=0.1)
    assert means(axes) == [(1.0, pytest.approx(0.5)), (2.0, 0.5)]
    interval = bootstrap_interval(VALUES[1.0])
    assert interval is not None
    assert whiskers(axes)[0] == pytest.approx((interval[0], interval[1]))
    assert whiskers(axes)[1] == pytest.approx((0.5, 0.5)), "a single seed has no interval"
    assert points(axes).tolist() == [[pytest.approx(0.9), value] for value in VALUES[1.0]], "nor a point beside it"
    assert axes.get_legend_handles_labels()[1] == ["k1"], "named once, however many places there are"


def test_lying_places_and_values_change_their_axes() -> None:
    axes = new_figure(3, 2).subplots()
    draw_points(axes, Points(label="", look=style(0), at=VALUES), confidence=0.95, aside=0.1, upright=False)
    assert means(axes)[0] == (pytest.approx(0.5), 1.0)
    assert axes.get_legend_handles_labels()[1] == []


def test_the_line_of_means_leaves_out_places_without_values() -> None:
    axes = new_figure(3, 2).subplots()
    join_means(axes, Points(label="", look=style(1), at=VALUES), [1.0, 1.5, 2.0])
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1.0, 2.0]
    assert list(line.get_ydata()) == pytest.approx([0.5, 0.5])
    assert line.get_color() == COLOURS[1]


@pytest.mark.parametrize(
    ("values", "wanted"), [([], False), ([1.0, 30.0], False), ([1.0, 31.0], True), ([0.0, 100.0], False)]
)
def test_when_an_axis_is_logarithmic(values: list[float], wanted: bool) -> None:
    assert wants_logarithm(values) is wanted


def test_decades_have_plain_numbers() -> None:
    axes = new_figure(3, 2).subplots()
    axes.set_yscale("log")
    axes.set_ylim(0.001, 0.1)
    show_decades(axes.yaxis)
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if 0.001 <= tick <= 0.1]
    assert ticks == pytest.approx([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1])
    assert axes.yaxis.get_major_formatter()(0.002, None) == "0.002"
    axes.set_ylim(1e-4, 1.0)
    show_decades(axes.yaxis)
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if 1e-4 <= tick <= 1.0]
    assert ticks == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_a_figure_is_written_for_screens_and_for_papers_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    def write(folder: Path) -> list[bytes]:
        folder.mkdir()
        figure = new_figure(3, 2)
        tidy(figure.subplots(), x="step", y="reward", title="KL(policy‖start)")
        files = save(figure, folder / "picture.png", dpi=80)
        assert [file.name for file in files] == ["picture.png", "picture.pdf", "picture.svg"]
        return [file.read_bytes() for file in files]

    first, again = write(tmp_path / "a"), write(tmp_path / "b")
    assert first == again
    _, pdf, svg = first
    assert pdf.startswith(b"%PDF") and b"/Type3" not in pdf, "letters as fonts, which publishers ask for"
    assert b"<svg" in svg and b"dc:date" not in svg
