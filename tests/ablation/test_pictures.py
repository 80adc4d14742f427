"""The pictures of an ablation: what is drawn where, read back from the figures; and that nothing makes them fail."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread
from tests.ablation.outcomes import BEFORE, failed, outcome, sweep

from klamp.ablation.outcome import Outcome
from klamp.ablation.pictures import (
    LONGEST_NAME,
    betas_of,
    draw_frontier,
    draw_sweep,
    named,
    new_figure,
    save,
    scale,
    style,
    tidy,
    write_pictures,
)


def points(axes: Any) -> np.ndarray:
    """The faint points of a panel, in the order they were drawn."""
    clouds = [each for each in axes.collections if isinstance(each, PathCollection)]
    return np.concatenate([np.asarray(cloud.get_offsets()) for cloud in clouds])


def means(axes: Any) -> list[tuple[float, float]]:
    """The marks of means."""
    lines = [container.lines[0] for container in axes.containers]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def whiskers(axes: Any) -> list[tuple[float, float]]:
    """Ends of the intervals, upright ones."""
    bars = [container.lines[2][0].get_segments()[0] for container in axes.containers]
    return [(float(low[1]), float(high[1])) for low, high in bars]


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


BETAS = [{"beta": 0.0}, {"beta": 0.001}, {"beta": 0.01}, {"beta": 0.1}]


def two(**changes: Any) -> list[Outcome]:
    """A run each at two betas."""
    return [outcome(f"{beta}", values={"beta": beta}, **changes) for beta in (0.0, 0.1)]


@pytest.mark.parametrize(("ended", "label"), [(0.1, "beta"), (0.5, "beta, as configured")])
def test_an_axis_of_betas_that_moved_says_that_it_is_where_they_began(ended: float, label: str) -> None:
    runs = [outcome(f"beta={b}", values={"beta": b}, numbers={"kl/reverse": 0.1, "beta": b}) for b in (0.0, 0.1)]
    figure = draw_sweep([runs[0], replace(runs[1], numbers={"kl/reverse": 0.1, "beta": ended})])
    assert figure is not None and {axes.get_xlabel() for axes in figure.axes} == {label}


HARD = {
    "no retained skills": two(after={"addition": 0.5}, before={"addition": 0.4}),
    "no numbers": two(numbers={}),
    "a number that is not finite": [*two(), *two(seed=1, numbers={"kl/reverse": math.nan, "kl/forward": math.inf})],
    "a KL of nothing": two(numbers={"kl/reverse": 0.0}),
    "the same everywhere": [run for seed in range(3) for run in two(seed=seed)],
    "one arm failed": [*sweep(BETAS[:2]), failed("beta=9", 0)],
    "a KL over six decades": [
        outcome(f"{k}", values={"beta": k}, numbers={"kl/reverse": k}) for k in (1e-6, 1e-3, 1.0)
    ],
    "names that are no names": [
        outcome(arm, values={"beta": float(i)}, numbers={"kl/reverse_sequence": 0.1})
        for i, arm in enumerate(("$x$", "_a", "", "a$"))
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
    assert draw_sweep([outcome(after={}, before={}, numbers={})]) is None
    assert draw_frontier([outcome(), failed()]) is None, "no KL of whole completions"
    assert list(tmp_path.iterdir()) == []


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


def test_the_sweep_shows_every_seed_and_the_mean_with_its_interval() -> None:
    runs = sweep(BETAS)
    figure = draw_sweep(runs)
    assert figure is not None
    skill, kl, retained = figure.axes
    scores = [[run.after["addition"] for run in runs if run.values["beta"] == beta] for beta in (0.0, 0.001, 0.01, 0.1)]
    assert np.allclose(points(skill)[:, 1], np.concatenate(scores))
    assert list(points(skill)[:, 0]) == list(np.repeat([0, 0.001, 0.01, 0.1], 3))
    assert [y for _, y in means(skill)] == pytest.approx([sum(ys) / 3 for ys in scores])
    assert np.allclose(whiskers(skill), [(min(ys), max(ys)) for ys in scores])
    assert [tick.get_text() for tick in skill.get_xticklabels()] == ["0", "0.001", "0.01", "0.1"]
    assert skill.get_legend() is None
    assert [text.get_text() for text in skill.texts] == ["before training"]
    assert labels(kl) == ["KL(policy‖start)", "KL(start‖policy)"]
    assert len(points(kl)) == 24
    assert retained.get_title() == "retained skills: subtraction, reversal"
    assert (skill.get_ylabel(), kl.get_ylabel()) == ("score after training", "nats per token")


def test_beta_zero_has_a_place_on_the_axis_a_decade_before_the_smallest() -> None:
    figure = draw_sweep(sweep(BETAS))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xscale() == "symlog"
    at = axes.transScale.transform([(beta, 0) for beta in (0, 0.001, 0.01, 0.1)])[:, 0]
    assert np.diff(at) == pytest.approx(at[3] - at[2], rel=0.2)
    low, high = axes.get_xlim()
    assert low < 0 and high > 0.1, "no point stands on the edge"


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


def test_only_where_beta_alone_was_swept_is_there_a_sweep() -> None:
    assert betas_of({f"{b}": {"beta": b, "kl_estimator": "k2"} for b in (0.1, 0.0)}) == {"0.1": 0.1, "0.0": 0.0}
    assert not betas_of({f"{b} {e}": {"beta": b, "kl_estimator": e} for e in ("k2", "k3") for b in (0.0, 0.1)})
    assert not betas_of({"a": {"beta": 0.1}, "b": {"beta": 0.1, "kl_estimator": "k1"}}), "one beta is no axis"
    assert not betas_of({"a": {"beta": 0.1}, "b": {}}), "an arm without a beta has no place on it"
    assert draw_sweep(sweep([{"kl_estimator": name} for name in ("k1", "k2")])) is None


def test_eighty_four_arms_look_different() -> None:
    assert len({style(i) for i in range(84)}) == 84 and style(84) == style(0)
    assert len({(look.colour, look.mark) for look in map(style, range(12))}) == 12
    assert len({(look.colour, look.dashes) for look in map(style, range(12))}) == 12


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("beta=0.1", "beta=0.1"), ("", "(no name)"), ("_private", "\u200b_private"), ("a$b$", r"a\$b\$")),
        ("start-" + "x" * LONGEST_NAME + "-end", f"start-{'x' * 17}…{'x' * 20}-end"),
    ],
)
def test_a_name_is_shown_as_it_is_written_and_a_long_one_with_both_of_its_ends(text: str, shown: str) -> None:
    assert named(text) == shown


VALUES = {1.0: (0.2, 0.4, 0.9), 2.0: (0.5,)}


@pytest.mark.parametrize(
    ("values", "scaled"),
    [([], "linear"), ([1.0, 30.0], "linear"), ([1.0, 31.0], "log"), ([0.0, 100.0], "linear")],
)
def test_an_axis_of_decades_is_logarithmic_and_has_plain_numbers(values: list[float], scaled: str) -> None:
    axes = new_figure(3, 2).subplots()
    scale(axes, "x", values)
    assert axes.get_xscale() == scaled and axes.get_yscale() == "linear"
    for low, wanted in ((0.001, [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]), (1e-4, [1e-4, 1e-3, 1e-2, 1e-1])):
        scale(axes, "y", [low, 0.1])
        axes.set_ylim(low, 0.1)
        ticks = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= 0.1 * 1.001]
        assert ticks == pytest.approx(wanted)
        assert axes.yaxis.get_major_formatter()(0.002, None) == "0.002"


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
