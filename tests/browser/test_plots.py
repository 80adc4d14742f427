"""Charts: every point where it belongs; its value under the cursor, smoothing, a logarithmic axis, zoom, files."""

from __future__ import annotations

import csv
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page
from tests.browser.conftest import Open
from tests.report.pages import run_of

from klamp.report.page import render
from klamp.report.run import ReportRun

STEPS = 100
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 164
Points = list[tuple[float, float]]


def chart(page: Page, title: str) -> Locator:
    return page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))


def noisy(factor: int, n: int = STEPS) -> list[float]:
    return [0.002 * step + 0.1 * (step * factor % 17) / 17 for step in range(1, n + 1)]


def write(file: Path, *runs: ReportRun) -> Path:
    file.write_text(render(runs), encoding="utf-8")
    return file


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    run = run_of(
        k3=noisy(5), k1=[value - 0.12 for value in noisy(7)], reward=[0.001 * 10 ** (3 * i / 99) for i in range(STEPS)]
    )
    return write(tmp_path / "alone.html", run)


def seed(number: int, arm: str, level: float, n: int = 20) -> ReportRun:
    curve = [level + 0.1 * number] * n
    return run_of(name=f"{arm}_seed-{number}", reward=curve, k3=curve, details={"group": arm})


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write(
        tmp_path / "sweep.html", *(seed(n, arm, level) for arm, level in (("a", 0.2), ("b", 0.6)) for n in (0, 1, 2))
    )


def points(path: Locator) -> Points:
    found = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get_attribute("d") or "")
    return [(float(x), float(y)) for x, y in found]


def curves(figure: Locator, look: str = ".curve:not(.raw)") -> list[Points]:
    return [points(path) for path in figure.locator(f"svg.chart path{look}").all()]


def readout(figure: Locator) -> dict[str, list[str]]:
    lines = figure.locator(".readout dl > div").all()
    return {line.locator("dt").inner_text(): line.locator("dd").all_inner_texts() for line in lines}


def hover(page: Page, figure: Locator, part: float) -> None:
    box = svg_box(figure)
    page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)


def svg_box(figure: Locator) -> dict[str, float]:
    svg = figure.locator("svg.chart")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box is not None
    return dict(box)


def drag(page: Page, figure: Locator, start: float, end: float) -> None:
    box = svg_box(figure)
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * start, height)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, height, steps=4)
    assert figure.locator(".select").count() == 1
    page.mouse.up()


def weighted(values: list[float], span: float) -> list[float]:
    """The exponentially weighted mean, written down anew."""
    found = []
    for last in range(len(values)):
        weights = [math.exp(-(last - i) / span) for i in range(last + 1)]
        found.append(sum(w * v for w, v in zip(weights, values[: last + 1], strict=True)) / sum(weights))
    return found


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
    config = {"target_kl": 0.1, "kl_controller": "step"}
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
        assert figure.locator(".unit").inner_text() == ("reward, log scale" if pressed else "reward")
        return pressed

    assert bends([0.02, 0.03, 0.03, 0.03, 0.04, 1e5])
    assert not bends([0.1, 0.1, 0.05, *[1e-13] * 6]) and not bends([0.1, 100.0]) and not bends([0.5])
    assert bends([1e300, 1.0, 2.0, 1.0, 1.0, 2.0, -1.0, 1.0, -1e300]), "and does not overflow"


def test_smoothing(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "KL to the reference")
    raw = curves(figure)
    slider = page.get_by_role("slider", name="Smoothing")
    assert slider.get_attribute("aria-valuetext") == "none"
    slider.fill("40")
    span = 0.25 * 0.4**2 * (STEPS - 1)
    assert slider.get_attribute("aria-valuetext") == "over about 7.9 steps"
    assert curves(figure, ".raw") == raw, "the raw curves stay behind"
    opacity = figure.locator("path.raw").first.evaluate("node => getComputedStyle(node).opacity")
    assert float(opacity) < 0.5
    hover(page, figure, (LEFT + (RIGHT - LEFT) * 49 / 99) / 360)
    found = readout(figure)
    values = {"k3": noisy(5), "k1": [value - 0.12 for value in noisy(7)]}
    assert figure.locator(".readout p").inner_text() == "step 50" and list(found) == ["k3", "k1"]
    for name, (plain, soft) in found.items():
        assert float(plain.replace("−", "-")) == pytest.approx(values[name][49], rel=1e-3)
        assert float(soft.removeprefix("~ ").replace("−", "-")) == pytest.approx(
            weighted(values[name], span)[49], rel=1e-3
        )
    slider.fill("0")
    page.mouse.move(0, 0)
    assert figure.locator("path.raw").count() == 0 and curves(figure) == raw


def test_a_long_run_is_smoothed_through_its_means(tmp_path: Path, open_page: Open) -> None:
    values = [10.0 if step % 10 == 0 else 0.0 for step in range(5000)]
    page = open_page(write(tmp_path / "long.html", run_of(train__grad_norm=values)))
    page.get_by_role("slider", name="Smoothing").fill("100")
    heights = [y for _, y in curves(chart(page, "Gradient norm"))[0]]
    mean = BOTTOM - (BOTTOM - TOP) * 1.0 / 10.5
    assert heights[len(heights) // 2] == pytest.approx(mean, abs=1), "1, the mean; that of what is drawn is 5"


def test_a_logarithmic_axis(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "Reward")
    log = figure.get_by_role("button", name="logarithmic axis")
    assert log.get_attribute("aria-pressed") == "false"
    log.focus()
    page.keyboard.press("Enter")
    assert log.get_attribute("aria-pressed") == "true"
    assert figure.locator(".unit").inner_text() == "reward, log scale"
    heights = [y for _, y in curves(figure)[0]]
    falls = [heights[i] - heights[i + 33] for i in (0, 33, 66)]
    assert falls == pytest.approx([falls[1]] * 3, rel=0.07), "each power of ten is as high"
    labels = figure.locator(".axes text").all_text_contents()
    assert {"0.001", "0.01", "0.1", "1"} <= set(labels)
    page.keyboard.press("Enter")
    assert figure.locator(".unit").inner_text() == "reward"


def test_a_range_is_dragged_and_a_double_click_shows_the_whole(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "KL to the reference")
    figure.get_by_role("button", name="enlarge").click()
    box = svg_box(figure)
    assert box["width"] > 1000 and box["height"] > 240
    whole = curves(figure)
    assert not figure.get_by_role("button", name="show the whole range").is_visible()
    drag(page, figure, 0.3, 0.6)
    zoomed = curves(figure)
    assert [len(each) for each in zoomed] < [len(each) for each in whole]
    xs = [x for x, _ in zoomed[0]]
    assert (min(xs), max(xs)) == pytest.approx((58, box["width"] - 10), abs=1), "cut at the edges, not before them"
    hover(page, figure, 0.5)
    step = int(figure.locator(".readout p").inner_text().split()[1])
    assert 40 <= step <= 50
    assert figure.get_by_role("button", name="show the whole range").is_visible()
    page.mouse.dblclick(box["x"] + box["width"] / 2, svg_box(figure)["y"] + 100)
    assert curves(figure) == whole
    figure.get_by_role("button", name="enlarge").press("Escape")
    assert svg_box(figure)["width"] < 500


def test_keys_zoom_too(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "Reward")
    whole = curves(figure)
    slider = figure.get_by_role("slider")
    slider.focus()
    for _ in range(50):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    assert 45 <= len(curves(figure)[0]) <= 55
    assert figure.locator(".at").inner_text() == "step 50", "the cursor stays"
    page.keyboard.press("-")
    assert curves(figure) == whole
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert curves(figure) == whole
    page.keyboard.press("Tab")
    assert figure.get_by_role("button", name="logarithmic axis").count() == 1


def test_what_was_set_survives_loading_the_page_again(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "KL to the reference")
    figure.get_by_role("button", name="logarithmic axis").click()
    drag(page, figure, 0.4, 0.7)
    page.get_by_role("slider", name="Smoothing").fill("30")
    before = curves(figure)
    page.reload()
    assert curves(figure) == before
    assert page.get_by_role("slider", name="Smoothing").input_value() == "30"


def saved(page: Page, figure: Locator, kind: str, folder: Path) -> Path:
    figure.locator(".save > summary").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name=f"save as {kind}").click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chart_is_saved(scheme: str, alone: Path, tmp_path: Path, open_page: Open) -> None:
    page = open_page(alone, color_scheme=scheme)
    figure = chart(page, "KL to the reference")
    svg = saved(page, figure, "SVG", tmp_path)
    tree = ElementTree.parse(svg).getroot()
    text = svg.read_text(encoding="utf-8")
    assert svg.name == "chart-kl.svg" and tree.tag.endswith("}svg")
    assert all(word in text for word in ("KL to the reference", "nats/token", ">k3<", ">k1<"))
    assert "class=" not in text and "var(" not in text and "cursor" not in text
    drawn = [each.get("d") for each in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert figure.locator("path.curve").first.get_attribute("d") in drawn
    paper = next(tree.iter("{http://www.w3.org/2000/svg}rect")).get("fill")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(26, 29, 35)")
    png = saved(page, figure, "PNG", tmp_path).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(png[16:20]) == 3 * 384 and len(png) > 10_000


def test_numbers_are_saved_and_no_name_is_a_formula(tmp_path: Path, open_page: Open) -> None:
    names = ["=1+1", 'quo"ted, comma', "@sum"]
    runs = [run_of(name=name, reward=noisy(3 + n, 12)) for n, name in enumerate(names)]
    page = open_page(write(tmp_path / "three.html", *runs))
    page.get_by_role("slider", name="Smoothing").fill("50")
    with saved(page, chart(page, "Reward"), "CSV", tmp_path).open(encoding="utf-8", newline="") as file:
        heading, *rows = csv.reader(file)
    assert heading[:4] == ["step", "'=1+1", 'quo"ted, comma', "'@sum"] and heading[4] == "'=1+1 (smoothed)"
    assert [int(row[0]) for row in rows] == list(range(1, 13))
    for column, run in enumerate(runs, start=1):
        assert [float(row[column]) for row in rows] == pytest.approx(list(run.curve("reward").values()), rel=1e-5)
        span = 0.25 * 0.25 * 11
        soft = weighted(list(run.curve("reward").values()), span)
        assert [float(row[column + 3]) for row in rows] == pytest.approx(soft, rel=1e-4)


def test_seeds_are_a_mean_with_a_band_or_each_run(sweep: Path, open_page: Open) -> None:
    page = open_page(sweep)
    figure = chart(page, "Reward")
    assert figure.locator(".legend .label").all_inner_texts() == ["a, mean of 3", "b, mean of 3"]
    assert len(curves(figure)) == 2 and figure.locator("path.spread").count() == 2
    low, middle, high = (BOTTOM - (BOTTOM - TOP) * value / (0.8 * 1.05) for value in (0.2, 0.3, 0.4))
    assert [y for _, y in curves(figure)[0]] == pytest.approx([middle] * 20, abs=0.1)
    assert [y for _, y in curves(figure, ".spread")[0]] == pytest.approx([high] * 20 + [low] * 20, abs=0.1)
    hover(page, figure, 0.5)
    assert readout(figure) == {"a": ["0.3", "0.2 to 0.4"], "b": ["0.7", "0.6 to 0.8"]}
    page.get_by_label("Seeds").select_option("each run")
    assert len(curves(figure)) == 6 and figure.locator("path.spread").count() == 0
    hover(page, figure, 0.6)
    assert {name: values[0] for name, values in readout(figure).items()} == {
        f"{arm}_seed-{n}": f"0.{digit}"
        for arm, digits in (("a", "234"), ("b", "678"))
        for n, digit in enumerate(digits)
    }


def test_scores_under_the_cursor_are_written_as_in_the_tiles(tmp_path: Path, open_page: Open) -> None:
    scores = [(step, {"a": 0.74609375, "b": 1.0} if step < 9 else {"a": 0.99609375, "b": 1.0}) for step in (0, 5, 9)]
    page = open_page(write(tmp_path / "scores.html", run_of(reward=[0.5] * 9, scores=scores)))
    figure, legend = chart(page, "Evaluations"), ".legend .value"
    tiles = page.locator(".tile").filter(has_text="points of 100").locator(".big")
    assert tiles.all_inner_texts() == ["99.6", "100.0"]
    assert figure.locator(legend).all_inner_texts() == ["99.6", "100.0"]
    hover(page, figure, 0.05)
    assert figure.locator(legend).all_inner_texts() == ["74.6", "100.0"]
    assert [values[0] for values in readout(figure).values()] == ["74.6", "100.0"]


def test_a_score_of_996_after_100_is_no_cliff_on_any_axis(tmp_path: Path, open_page: Open) -> None:
    """Where both ends of a scale are known the axis has them: in powers of ten, and in a range that is zoomed to."""
    scores = [(step, {"a": 1.0 if step < 30 else 0.996}) for step in range(0, 60, 2)]
    page = open_page(write(tmp_path / "scores.html", run_of(reward=[0.5] * 60, scores=scores)))
    figure = chart(page, "Evaluations")

    def fall() -> float:
        heights = [y for _, y in curves(figure)[0]]
        return (max(heights) - min(heights)) / (BOTTOM - TOP)

    assert 0 < fall() < 0.01
    figure.get_by_role("button", name="logarithmic axis").click()
    assert 0 < fall() < 0.02
    figure.get_by_role("button", name="logarithmic axis").click()
    drag(page, figure, 0.3, 0.8)
    assert 0 < fall() < 0.01


def test_seeds_that_agree_have_no_range(tmp_path: Path, open_page: Open) -> None:
    runs = [run_of(name=f"a_seed-{n}", beta=[0.0, 0.1, 0.1 * n], details={"group": "a"}) for n in (1, 2)]
    page = open_page(write(tmp_path / "agree.html", *runs))
    figure = chart(page, "beta")
    assert figure.locator(".legend .span").inner_text() == "0.1 to 0.2"
    hover(page, figure, 0.5)
    assert figure.locator(".legend .span").inner_text() == "each"


def test_the_overview_of_a_sweep_is_not_cut(tmp_path: Path, open_page: Open) -> None:
    skills = ["addition", "reversal", "instruction-following-strict", "multiplication", "translation", "summaries"]
    runs = [
        run_of(
            name=f"beta-0.{i}_learning_rate-0.0001_seed-{i}",
            scores=[(step, dict.fromkeys(skills, 0.123 * (1 + step))) for step in (0, 6)],
            exact=noisy(3),
            kl__exact_sequence=noisy(5),
            reward=noisy(7),
            length=noisy(9),
            beta=noisy(11),
            policy__entropy=noisy(13),
            details={"kl_after": 0.12345, "kl_after_sequence": 4.5678},
        )
        for i in range(8)
    ]
    page = open_page(write(tmp_path / "sweep.html", *runs))
    region = page.get_by_role("region", name="Table: headline numbers of each run")
    assert region.evaluate("node => node.scrollWidth <= node.clientWidth"), "all columns are seen at 1280 px"
    headings = region.locator("thead th").all_inner_texts()
    assert headings[:3] == ["run", "alarms", "KL from the start (exact), nats/token"]
    assert headings[3:5] == ["KL (exact), nats/token", "KL per completion (exact), nats"]
    assert len(headings) == 15


def test_keys_do_the_same(alone: Path, open_page: Open) -> None:
    page = open_page(alone)
    figure = chart(page, "Reward")
    slider, value = figure.get_by_role("slider"), figure.locator(".legend .value")
    slider.focus()
    page.keyboard.press("Home")
    assert (figure.locator(".at").inner_text(), value.inner_text()) == ("step 1", "0.001")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert (figure.locator(".at").inner_text(), value.inner_text()) == ("step 4", "0.001233")
    assert slider.get_attribute("aria-valuetext") == "step 4: reward 0.001233"
    assert slider.get_attribute("aria-label") == "Reward: values by step"
    page.keyboard.press("Tab")
    assert figure.locator(".at").inner_text() == "last: step 100", "as before"
