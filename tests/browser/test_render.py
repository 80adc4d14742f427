"""The page renders, everywhere, and does nothing else."""

from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.browser.conftest import NARROW, WIDE, Open
from tests.report.pages import completion, run_of

from klamp.report.page import LIMIT, render

OVERFLOW = """() => {
  const wide = document.documentElement.clientWidth;
  const within = (node) => node.closest(".scroll, .prompt");
  return [document.documentElement.scrollWidth - wide, ...Array.from(document.querySelectorAll("main *, header *"))
    .filter((node) => !within(node) && !node.closest("svg, .unseen, details:not([open]) > :not(summary)"))
    .filter((node) => node.getBoundingClientRect().right > wide + 1)
    .map((node) => node.outerHTML.slice(0, 120))];
}"""
TEXT = """node => {
  const text = document.createRange();
  text.selectNodeContents(node);
  return text.getBoundingClientRect().toJSON();
}"""
"""The place of a node's text, without what is around it."""


@pytest.mark.parametrize("which", ["report", "comparison", "hostile"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "400"])
def test_nothing_sticks_out(
    which: str, viewport: dict[str, int], request: pytest.FixtureRequest, open_page: Open
) -> None:
    page = open_page(request.getfixturevalue(which), viewport=viewport)
    assert page.evaluate(OVERFLOW) == [0]


def test_a_small_number_with_a_long_unit_stays_in_its_tile(tmp_path: Path, open_page: Open) -> None:
    run = run_of(k3=[0.1] * 3, beta=[0.03, 0.000535, 0.000535])
    file = tmp_path / "report.html"
    file.write_text(render([run]), encoding="utf-8")
    for viewport in (WIDE, NARROW):
        spilled = """() => Array.from(document.querySelectorAll(".tile")).flatMap((tile) =>
          Array.from(tile.querySelectorAll("span")).filter((node) =>
            node.getBoundingClientRect().right > tile.getBoundingClientRect().right).map((node) => node.innerText))"""
        page = open_page(file, viewport=viewport)
        assert page.get_by_text("reward/nat").first.is_visible()
        assert page.evaluate(spilled) == []


def test_everything_is_there_and_in_line(report: Path, open_page: Open) -> None:
    page = open_page(report)
    assert page.get_by_role("heading", level=1).inner_text() == "fast"
    for name in ("Overview", "Alarms", "Over steps", "Before and after", "Token by token", "Configuration"):
        assert page.get_by_role("region", name=name, exact=True).is_visible()
    assert page.get_by_role("img", name="KL to the reference").is_visible()
    assert page.locator(".finding.alarm").count() >= 1
    assert page.locator(".completion:visible").count() == 25
    sizes = page.locator("svg.chart").evaluate_all("all => all.map((svg) => svg.getBoundingClientRect().width)")
    assert min(sizes) > 250
    tops = page.locator("#curves .plot").evaluate_all("all => all.map((plot) => plot.getBoundingClientRect().top)")
    assert len(tops) >= 9 and len(set(tops[:3])) == 1 and len(set(tops[3:6])) == 1, "charts of a row are aligned"
    tools = page.locator("#chart-reward .tools")
    places = [tools.get_by_text(name, exact=True).evaluate(TEXT)["top"] for name in ("Log", "Enlarge")]
    assert max(places) - min(places) < 0.5, "the words on its buttons are on one line"


def test_the_theme_follows_the_system_and_the_button(report: Path, open_page: Open) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = open_page(report, color_scheme="dark")
    dark = background()
    page.get_by_role("button", name="Light theme").click()
    light = background()
    assert sum(map(int, dark[4:-1].split(","))) < 100 < 700 < sum(map(int, light[4:-1].split(",")))
    page.get_by_role("button", name="Dark theme").click()
    assert background() == dark


def test_hostile_text_is_shown_and_not_run(hostile: Path, open_page: Open) -> None:
    page = open_page(hostile)
    assert "owned" not in page.title().replace("document.title='owned'", "")
    assert page.locator("img, iframe, object, embed").count() == 0
    assert page.locator("script").count() == 1
    assert page.locator(".tokens span").first.inner_text().startswith("</script></style><img")
    assert "⟨U+202E⟩" in page.locator(".tokens").inner_text()
    first = page.locator(".tokens span").first
    first.hover()
    assert page.locator("#tip .token").inner_text().startswith("</script></style><img")
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1


def test_runs_side_by_side_have_columns_of_one_width_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    file = tmp_path / "two.html"
    file.write_text(render([run_of(name=f"beta-0.1_seed-{n}", reward=[0.5], exact=[0.1]) for n in (0, 1)]))
    page = open_page(file, viewport=NARROW)
    cells = page.locator("table.headlines tbody tr").first.locator("td").all()
    widths = [cell.evaluate("node => node.offsetWidth") for cell in cells]
    assert len(widths) == 2 and min(widths) >= 112 and widths[0] == pytest.approx(widths[1], abs=1), widths


def test_a_large_record_fits(tmp_path: Path, open_page: Open) -> None:
    n = 900
    rows = [
        completion(
            step=step,
            tokens=[f"Ġword{i % 97}" for i in range(n)],
            policy=[-1.0 - (i * 7919 % 100) / 50 for i in range(n)],
            ref=[-1.0 - (i * 104729 % 100) / 50 - step / 500 for i in range(n)],
            sampler=[-1.0 - (i * 7919 % 100) / 50 for i in range(n)],
            prompt=f"Question {step}",
        )
        for step in range(1, 121)
    ]
    run = run_of(completions=rows, k3=[0.1 + step % 7 for step in range(5000)], reward=[0.5] * 5000)
    file = tmp_path / "report.html"
    file.write_text(render([run]), encoding="utf-8")
    assert 0.9 * LIMIT < file.stat().st_size <= LIMIT
    page = open_page(file)
    cards = page.locator(".completion").count()
    assert 10 < cards < 120
    assert f"{cards} of 120 completions" in page.locator("#left-out").inner_text()
    page.get_by_label("Text").fill("Question 120\nword0 word1")
    page.get_by_label("Text").fill("question 120")
    expect(page.get_by_role("status")).to_have_text(f"1 of 1 shown; {cards} on the page")
