"""Charts: every point where it belongs, its value under the cursor, a logarithmic axis, a large view."""

import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page
from tests.browser.conftest import Open, write
from tests.report.pages import run_of

STEPS = 100
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 164
Points = list[tuple[float, float]]


def chart(page: Page, title: str) -> Locator:
    return page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))


def noisy(factor: int, n: int = STEPS) -> list[float]:
    return [0.002 * step + 0.1 * (step * factor % 17) / 17 for step in range(1, n + 1)]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    reward = [0.001 * 10 ** (3 * i / 99) for i in range(STEPS)]
    return write(tmp_path / "alone.html", run_of(k3=noisy(5), k1=[value - 0.12 for value in noisy(7)], reward=reward))


def points(path: Locator) -> Points:
    found = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get_attribute("d") or "")
    return [(float(x), float(y)) for x, y in found]


def curves(figure: Locator) -> list[Points]:
    return [points(path) for path in figure.locator("svg.chart path.curve").all()]


def readout(figure: Locator) -> dict[str, str]:
    lines = figure.locator(".readout dl > div").all()
    return {line.locator("dt").inner_text(): line.locator("dd").inner_text() for line in lines}


def hover(page: Page, figure: Locator, part: float) -> None:
    box = svg_box(figure)
    page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)


def svg_box(figure: Locator) -> dict[str, float]:
    svg = figure.locator("svg.chart")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box is not None
    return dict(box)


def test_points_are_where_their_values_are_with_gaps_where_they_are_not_finite(tmp_path: Path, open_page: Open) -> None:
    values = [0.1, 0.2, math.nan, 0.4, math.inf, 0.6, 0.7] + [1.0] * 14
    page = open_page(write(tmp_path / "gaps.html", run_of(reward=values)))
    figure = chart(page, "Reward")
    (found,) = curves(figure)
    heights = [BOTTOM - (BOTTOM - TOP) * value / 1.05 for value in values if math.isfinite(value)]
    assert [y for _, y in found] == pytest.approx(heights, abs=0.1)
    assert (found[0][0], found[-1][0]) == (LEFT, RIGHT)
    path = figure.locator("svg.chart path.curve").get_attribute("d") or ""
    assert [part.count("L") for part in path.split("M")[1:]] == [1, 0, 15]
    assert figure.locator("svg.chart path.dot").count() == 1, "a point between two gaps"


def test_targets_bands_and_alarms_are_drawn(tmp_path: Path, open_page: Open) -> None:
    config = {"target_kl": 0.1, "kl_controller": "step", "kl_controller_factors": [1.5, 0.75, 1.5, 0.5]}
    run = run_of(k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7], details={"config": config})
    svg = chart(open_page(write(tmp_path / "marks.html", run)), "KL to the reference").locator("svg.chart")
    high = 0.7 * 1.05
    level, band = svg.locator("line.level"), svg.locator("rect.band")
    assert float(level.get_attribute("y1") or 0) == pytest.approx(BOTTOM - (BOTTOM - TOP) * 0.1 / high, abs=0.1)
    assert float(band.get_attribute("height") or 0) == pytest.approx((BOTTOM - TOP) * 0.1 / high, abs=0.2)
    assert svg.locator("g.mark text").all_text_contents() == ["1"]
    assert float(svg.locator("g.mark line").get_attribute("x1") or 0) == RIGHT


def test_an_axis_bends_by_itself_where_nothing_else_could_be_seen(tmp_path: Path, open_page: Open) -> None:
    def bends(values: list[float], **details: object) -> bool:
        page = open_page(write(tmp_path / "bends.html", run_of(reward=values, details=details or None)))
        figure = chart(page, "Reward")
        pressed = figure.get_by_role("button", name="logarithmic axis").get_attribute("aria-pressed") == "true"
        assert figure.locator(".unit").inner_text() == ("log scale" if pressed else "")
        return pressed

    assert bends([0.02, 0.03, 0.03, 0.03, 0.04, 1e5])
    assert not bends([0.1, 0.1, 0.05, *[1e-13] * 6]) and not bends([0.1, 100.0]) and not bends([0.5])
    assert bends([1e300, 1.0, 2.0, 1.0, 1.0, 2.0, -1.0, 1.0, -1e300]), "and does not overflow"


def test_a_logarithmic_axis(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "Reward")
    log = figure.get_by_role("button", name="logarithmic axis")
    assert log.get_attribute("aria-pressed") == "false"
    log.focus()
    page.keyboard.press("Enter")
    assert log.get_attribute("aria-pressed") == "true"
    assert figure.locator(".unit").inner_text() == "log scale"
    heights = [y for _, y in curves(figure)[0]]
    falls = [heights[i] - heights[i + 33] for i in (0, 33, 66)]
    assert falls == pytest.approx([falls[1]] * 3, rel=0.07), "each power of ten is as high"
    labels = figure.locator(".axes text").all_text_contents()
    assert {"0.001", "0.01", "0.1", "1"} <= set(labels)
    page.keyboard.press("Enter")
    assert figure.locator(".unit").inner_text() == ""


def test_scores_under_the_cursor_are_written_as_in_the_tiles(tmp_path: Path, open_page: Open) -> None:
    scores = [(step, {"a": 0.74609375, "b": 1.0} if step < 9 else {"a": 0.99609375, "b": 1.0}) for step in (0, 5, 9)]
    page = open_page(write(tmp_path / "scores.html", run_of(reward=[0.5] * 9, scores=scores)))
    figure, legend = chart(page, "Evaluations"), ".legend .value"
    tiles = page.locator(".tile").filter(has_text="points of 100").locator(".big")
    assert tiles.all_inner_texts() == ["99.6", "100.0"]
    assert figure.locator(legend).all_inner_texts() == ["99.6", "100.0"]
    hover(page, figure, 0.05)
    assert [*readout(figure).values()] == ["74.6", "100.0"]


def test_a_score_of_996_after_100_is_no_cliff_on_any_axis(tmp_path: Path, open_page: Open) -> None:
    """If both ends of a scale are known, the axis has them, in powers of ten too."""
    scores = [(step, {"a": 1.0 if step < 30 else 0.996}) for step in range(0, 60, 2)]
    page = open_page(write(tmp_path / "scores.html", run_of(reward=[0.5] * 60, scores=scores)))
    figure = chart(page, "Evaluations")

    def fall() -> float:
        heights = [y for _, y in curves(figure)[0]]
        return (max(heights) - min(heights)) / (BOTTOM - TOP)

    assert 0 < fall() < 0.01
    figure.get_by_role("button", name="logarithmic axis").click()
    assert 0 < fall() < 0.02


def test_the_overview_of_a_sweep_is_not_cut(tmp_path: Path, open_page: Open) -> None:
    skills = ["addition", "reversal", "instruction-following-strict", "multiplication", "translation", "summaries"]
    scores = [(step, dict.fromkeys(skills, 0.123 * (1 + step))) for step in (0, 6)]
    metrics = ("exact", "kl__exact_sequence", "reward", "length", "beta", "policy__entropy")
    curves = {name: noisy(factor) for name, factor in zip(metrics, range(3, 15, 2), strict=True)}
    outcome = {"kl/reverse": 0.12345, "kl/reverse_sequence": 4.5678}
    names = [f"beta-0.{i}_learning_rate-0.0001_seed-{i}" for i in range(8)]
    runs = [run_of(name=name, scores=scores, details={"outcome": outcome}, **curves) for name in names]
    page = open_page(write(tmp_path / "sweep.html", *runs))
    region = page.get_by_role("region", name="Table: headline numbers of each run")
    assert region.evaluate("node => node.scrollWidth <= node.clientWidth"), "all columns are seen at 1280 px"
    headings = region.locator("thead th").all_inner_texts()
    assert headings[:3] == ["run", "alarms", "KL from the start (exact), nats/token"]
    assert headings[3:5] == ["KL (exact), nats/token", "KL per completion (exact), nats"]
    assert len(headings) == 15


def test_an_enlarged_chart_is_as_wide_as_the_page(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "KL to the reference")
    figure.get_by_role("button", name="enlarge").click()
    box = svg_box(figure)
    assert box["width"] > 1000 and box["height"] > 240
    assert (curves(figure)[0][0][0], curves(figure)[0][-1][0]) == pytest.approx((58, box["width"] - 10), abs=1)
    hover(page, figure, 0.5)
    assert 45 <= int(figure.locator(".readout p").inner_text().split()[1]) <= 52
    figure.get_by_role("button", name="enlarge").press("Escape")
    assert svg_box(figure)["width"] < 500


def test_seeds_share_a_colour_and_a_line_of_the_legend(tmp_path: Path, open_page: Open) -> None:
    levels = {"a_seed-0": 0.2, "a_seed-1": 0.3, "b_seed-0": 0.6, "b_seed-1": 0.7}
    runs = [run_of(name=name, reward=[level] * 20, details={"group": name[0]}) for name, level in levels.items()]
    page = open_page(write(tmp_path / "sweep.html", *runs))
    figure = chart(page, "Reward")
    assert figure.locator(".legend .label").all_inner_texts() == ["a, 2 runs", "b, 2 runs"]
    looks = [path.get_attribute("class") for path in figure.locator("svg.chart path.curve").all()]
    assert looks == ["curve s0 d0"] * 2 + ["curve s1 d1"] * 2
    hover(page, figure, 0.5)
    assert readout(figure) == {name: str(level) for name, level in levels.items()}


def test_the_arrow_keys_read_the_values(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "Reward")
    slider = figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    assert (figure.locator(".readout p").inner_text(), readout(figure)) == ("step 1", {"reward": "0.001"})
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert (figure.locator(".readout p").inner_text(), readout(figure)) == ("step 4", {"reward": "0.001233"})
    assert slider.get_attribute("aria-valuetext") == "step 4: reward 0.001233"
    assert slider.get_attribute("aria-label") == "Reward: values by step"
    page.keyboard.press("Tab")
    assert not figure.locator(".readout").is_visible()
