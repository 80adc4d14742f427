"""The pictures of an ablation: what is drawn where, read back from the figures; and that nothing makes them fail."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread
from tests.ablation.figures import points
from tests.ablation.outcomes import BEFORE, failed, outcome, sweep

from klamp.ablation.pictures import draw_courses, draw_forgetting, draw_frontier, write_pictures
from klamp.ablation.statistics import rank_correlation

pytestmark = pytest.mark.slow

FORMATS = (".png", ".pdf", ".svg")
BETAS = [{"beta": 0.0}, {"beta": 0.001}, {"beta": 0.01}, {"beta": 0.1}]


def test_forgetting_is_one_point_per_run_with_the_rank_correlation() -> None:
    runs = sweep(BETAS)
    figure = draw_forgetting(runs)
    assert figure is not None
    reverse, forward = figure.axes
    lost = [1.96 / 2 - (run.after["subtraction"] + run.after["reversal"]) / 2 for run in runs]
    kl = [run.numbers["kl/reverse"] for run in runs]
    assert np.allclose(points(reverse), list(zip(kl, lost, strict=True)))
    assert np.allclose(points(forward), [(run.numbers["kl/forward"], y) for run, y in zip(runs, lost, strict=True)])
    found = rank_correlation(kl, lost)
    assert found is not None
    assert found.value > 0.8, "the made-up sweep forgets with its KL"
    assert reverse.get_title() == f"rank correlation {found.value:.2f} [{found.low:.2f}, {found.high:.2f}], 12 runs"
    assert reverse.get_xlabel() == "KL(policy‖start) (nats/token)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"beta={b}" for b in (0.0, 0.001, 0.01, 0.1)]


def test_where_nothing_was_forgotten_the_axis_does_not_magnify_it() -> None:
    figure = draw_forgetting([outcome(seed=i, after={**BEFORE, "addition": 1.0}) for i in range(3)])
    assert figure is not None
    assert figure.axes[0].get_ylim() == pytest.approx((-0.01, 0.01), abs=1e-3)


def test_two_runs_have_no_rank_correlation_and_the_title_says_so() -> None:
    figure = draw_forgetting([outcome(seed=0), outcome(seed=1)])
    assert figure is not None
    assert figure.axes[0].get_title() == "no rank correlation (2 runs)"


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


def test_all_four_are_written(tmp_path: Path) -> None:
    written = write_pictures(sweep(BETAS), tmp_path)
    names = [f"{name}{ending}" for name in ("frontier", "sweep", "forgetting", "courses") for ending in FORMATS]
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
