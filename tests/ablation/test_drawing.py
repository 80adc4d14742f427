"""The parts that pictures share: looks, names, means with intervals, axes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ablation.figures import means, points, whiskers

from klamp.ablation.drawing import (
    COLOURS,
    LONGEST_NAME,
    Points,
    draw_points,
    join_means,
    named,
    new_figure,
    save,
    show_decades,
    style,
    tidy,
    wants_logarithm,
)
from klamp.ablation.statistics import bootstrap_interval


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


def test_a_tidy_diagram_has_labels_and_no_box() -> None:
    axes = new_figure(3, 2).subplots()
    tidy(axes, x="beta", y="nats", title="KL")
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("beta", "nats", "KL")
    assert [side for side, spine in axes.spines.items() if not spine.get_visible()] == ["right", "top"]


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
