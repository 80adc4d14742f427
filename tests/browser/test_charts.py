"""The value under the cursor, by mouse and by keys."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Locator, Page
from tests.browser.conftest import Open


def chart(page: Page, title: str) -> Locator:
    return page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))


def logged(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def legend(figure: Locator) -> dict[str, float]:
    items = figure.locator(".legend li:has(.value)")
    pairs = zip(items.locator(".label").all_inner_texts(), items.locator(".value").all_inner_texts(), strict=True)
    return {label: float(value.replace("−", "-")) for label, value in pairs}


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 5e-4 * abs(b) + 1e-12


def test_hovering_shows_what_was_logged(report: Path, open_page: Open) -> None:
    page = open_page(report)
    figure = chart(page, "KL to the reference")
    curves = {label: logged(report.parent, f"kl/{label}") for label in ("exact", "k3", "k1")}
    svg = figure.locator("svg.chart")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box is not None
    before = legend(figure)
    for step in (1, 5, 10):
        x = box["x"] + box["width"] * (46 + 304 * (step - 1) / 9) / 360
        page.mouse.move(x + 3, box["y"] + box["height"] / 2)
        assert figure.locator(".at").inner_text() == f"step {step}"
        shown = legend(figure)
        assert all(close(shown[label], curve[step]) for label, curve in curves.items())
        assert svg.locator(".cursor.on").count() == 1
    page.mouse.move(0, 0)
    assert legend(figure) == before and svg.locator(".cursor.on").count() == 0
    assert close(before["k3"], curves["k3"][10])


def test_keys_do_the_same(report: Path, open_page: Open) -> None:
    page = open_page(report)
    figure = chart(page, "Reward")
    reward = logged(report.parent, "reward")
    slider = figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    assert figure.locator(".at").inner_text() == "step 1" and close(legend(figure)["reward"], reward[1])
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert figure.locator(".at").inner_text() == "step 4" and close(legend(figure)["reward"], reward[4])
    assert (slider.get_attribute("aria-valuetext") or "").startswith("step 4: reward ")
    assert slider.get_attribute("aria-label") == "Reward: values by step"
    page.keyboard.press("Tab")
    assert figure.locator(".at").inner_text() == "last: step 10", "as before"
    kl = chart(page, "KL to the reference")
    kl.get_by_role("slider").focus()
    shown = [item.replace("\n", " ") for item in kl.locator(".legend li:has(.value)").all_inner_texts()]
    assert kl.get_by_role("slider").get_attribute("aria-valuetext") == f"step 10: {', '.join(shown)}"
    assert [item.split()[0] for item in shown] == ["exact", "k3", "k1", "exact"]


def test_every_chart_has_its_numbers_in_a_table(report: Path, open_page: Open) -> None:
    page = open_page(report)
    figures = page.locator("figure")
    assert figures.count() >= 12
    for i in range(figures.count()):
        figure = figures.nth(i)
        figure.locator(".data > summary").click()
        assert figure.locator("table tbody tr").first.is_visible()
    rows = chart(page, "Reward").locator("tbody tr")
    reward = logged(report.parent, "reward")
    shown = {int(row.split()[0]): float(row.split()[1]) for row in rows.all_inner_texts()}
    assert shown.keys() == reward.keys() and all(close(shown[step], reward[step]) for step in reward)
