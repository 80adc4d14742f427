"""The picture of an ablation: what is drawn where, read back from the figure; and that nothing makes it fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread
from tests.ablation.outcomes import BEFORE, failed, outcome, sweep

from klamp.ablation.outcome import Outcome
from klamp.ablation.pictures import LONGEST_NAME, draw_frontier, named, write_picture


def points(axes: Any) -> np.ndarray:
    """The points of a panel, in the order they were drawn."""
    clouds = [each for each in axes.collections if isinstance(each, PathCollection)]
    return np.concatenate([np.asarray(cloud.get_offsets()) for cloud in clouds])


KL = {"kl/reverse_sequence": 0.3}


def two(**changes: Any) -> list[Outcome]:
    """A run each at two betas."""
    return [outcome(f"{beta}", **{"values": {"beta": beta}, "numbers": KL, **changes}) for beta in (0.0, 0.1)]


HARD = {
    "no retained skills": two(after={"addition": 0.5}, before={"addition": 0.4}),
    "no score before": two(before={}),
    "a KL of nothing": two(numbers={"kl/reverse_sequence": 0.0}),
    "the same everywhere": [run for seed in range(3) for run in two(seed=seed)],
    "one arm failed": [*sweep([{"beta": 0.0}, {"beta": 0.001}]), failed("beta=9", 0)],
    "a KL over six decades": [outcome(f"{k}", numbers={"kl/reverse_sequence": k}) for k in (1e-6, 1e-3, 1.0)],
    "names that are no names": [outcome(arm, numbers=KL) for arm in ("$x$", "_a", "", "a$")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_nothing_makes_it_fail(name: str, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    (file,) = write_picture(HARD[name], tmp_path)
    image = imread(file)
    assert file.name == "frontier.png" and min(image.shape[:2]) > 300
    assert image[..., :3].std() > 0.02, "something was drawn"
    assert dict(mpl.rcParams) == before, "no global state"


def test_without_a_kl_there_is_no_picture(tmp_path: Path) -> None:
    assert write_picture([], tmp_path) == write_picture([outcome(), failed()], tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_the_axis_of_kls_over_decades_is_logarithmic() -> None:
    figures = [draw_frontier([outcome(f"{k}", numbers={"kl/reverse_sequence": k}) for k in (1.0, m)]) for m in (30, 31)]
    assert [figure.axes[0].get_xscale() for figure in figures if figure] == ["linear", "log"]


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("beta=0.1", "beta=0.1"), ("", "(no name)"), ("_private", "\u200b_private"), ("a$b$", r"a\$b\$")),
        ("start-" + "x" * LONGEST_NAME + "-end", f"start-{'x' * 17}…{'x' * 20}-end"),
    ],
)
def test_a_name_is_shown_as_it_is_written_and_a_long_one_with_both_of_its_ends(text: str, shown: str) -> None:
    assert named(text) == shown
