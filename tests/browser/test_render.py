"""Pages in a real browser: layout, contrast, keyboard, paper, and the site."""

import os
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from playwright.sync_api import Browser, expect
from pypdf import PdfReader
from tests.browser.conftest import NARROW, WIDE, Open, watched, write
from tests.report.pages import completion, run_of

from klamp.report.page import LIMIT

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
NAMELESS = """() => Array.from(document.querySelectorAll(
    "a, button, input, select, [tabindex], [role=img], [role=group]"))
  .filter((node) => {
    const labelled = (node.getAttribute("aria-labelledby") ?? "").split(" ").some((id) => document.getElementById(id));
    return !(node.getAttribute("aria-label") || labelled || node.labels?.length || node.textContent.trim());
  })
  .map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("which", ["report", "comparison", "hostile"])
def test_nothing_sticks_out_and_everything_has_a_name(which: str, request: Any, open_page: Open) -> None:
    for viewport in (WIDE, NARROW):
        page = open_page(request.getfixturevalue(which), viewport=viewport)
        assert (page.evaluate(OVERFLOW), page.evaluate(NAMELESS)) == ([0], []), viewport


def test_a_small_number_with_a_long_unit_stays_in_its_tile(tmp_path: Path, open_page: Open) -> None:
    file = write(tmp_path / "report.html", run_of(k3=[0.1] * 3, beta=[0.03, 0.000535, 0.000535]))
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


def test_answers_and_worst_tokens_take_less_than_a_third_of_the_page(report: Path, open_page: Open) -> None:
    page = open_page(report)
    heights = [page.locator(part).bounding_box()["height"] for part in ("#answers", ".scroll:has(.worst)", "main")]
    assert sum(heights[:2]) < heights[2] / 3
    rows = page.locator(".answers tbody tr").evaluate_all("all => all.map((row) => row.offsetHeight)")
    assert min(rows) < 40, "an answer and its score are on one line"


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
    assert page.locator(".tokens span").first.inner_text().startswith("</script></style><img")
    assert "⟨U+202E⟩" in page.locator(".tokens").inner_text()
    first = page.locator(".tokens span").first
    first.hover()
    assert page.locator("#tip .token").inner_text().startswith("</script></style><img")
    assert page.locator("img, iframe, object, embed").count() == 0 and page.locator("script").count() == 1


def test_runs_side_by_side_have_columns_of_one_width_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    runs = [run_of(name=f"beta-0.1_seed-{n}", reward=[0.5], exact=[0.1]) for n in (0, 1)]
    page = open_page(write(tmp_path / "two.html", *runs), viewport=NARROW)
    cells = page.locator("table.headlines tbody tr").first.locator("td").all()
    widths = [cell.evaluate("node => node.offsetWidth") for cell in cells]
    assert len(widths) == 2 and min(widths) >= 112 and widths[0] == pytest.approx(widths[1], abs=1), widths


def test_a_large_record_fits(tmp_path: Path, open_page: Open) -> None:
    tokens, policy = [f"Ġword{i % 97}" for i in range(900)], [-1.0 - (i * 7919 % 100) / 50 for i in range(900)]
    row = completion(tokens=tokens, policy=policy, sampler=policy)
    refs = {step: [-1.0 - (i * 104729 % 100) / 50 - step / 500 for i in range(900)] for step in range(1, 121)}
    rows = [replace(row, step=step, ref=ref, prompt=f"Question {step}") for step, ref in refs.items()]
    run = run_of(completions=rows, k3=[0.1 + step % 7 for step in range(5000)], reward=[0.5] * 5000)
    file = write(tmp_path / "report.html", run)
    assert 0.9 * LIMIT < file.stat().st_size <= LIMIT
    page = open_page(file)
    cards = page.locator(".completion").count()
    assert 10 < cards < 120
    assert f"{cards} of 120 completions" in page.locator("#left-out").inner_text()
    page.get_by_label("Text").fill("Question 120\nword0 word1")
    page.get_by_label("Text").fill("question 120")
    expect(page.get_by_role("status")).to_have_text(f"1 of 1 shown; {cards} on the page")


CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
SHADES = """(names) => names.forEach((name) => {
  const span = document.createElement("span");
  span.className = span.textContent = name;
  document.querySelector("#completions .tokens").append(span);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["report", "comparison"])
def test_contrast_also_of_every_shade(which: str, scheme: str, request: Any, open_page: Open) -> None:
    page = open_page(request.getfixturevalue(which), color_scheme=scheme)
    page.evaluate("() => { for (const each of document.querySelectorAll('details')) each.open = true; }")
    page.locator(".tokens span").first.focus()
    page.evaluate(SHADES, ["p1", "p2", "p3", "p4", "n1", "n2", "n3", "n4", "z", "u", "m", "q"])
    seen, findings = page.evaluate(CONTRAST)
    assert seen > 500 and findings == []


def test_the_keyboard_reaches_everything_in_order(report: Path, open_page: Open) -> None:
    page = open_page(report)
    stops: list[str] = []
    for _ in range(400):
        page.keyboard.press("Tab")
        stop = page.evaluate("""() => {
          const node = document.activeElement;
          if (node === document.body) return "";
          const place = node.closest("section")?.id ?? (node.closest("main") ? "title" : "bar");
          return `${place}|${node.id || node.className || node.tagName}`;
        }""")
        if not stop:
            break
        stops.append(stop)
    assert stops[0].endswith("|skip")
    sections = list(dict.fromkeys(stop.split("|")[0] for stop in stops[1:]))
    assert sections == ["bar", "title", "alarms", "curves", "answers", "tokens", "configuration"]
    names = [stop.split("|")[1] for stop in stops]
    assert "theme" in names and "f-text" in names and "more" in names and names.count("scrub") >= 12
    tokens = page.locator(".completion:visible").count()
    assert tokens == 25 and len(stops) < 300, "tokens and rows of tables are no stops"


def test_focus_is_always_seen(report: Path, open_page: Open) -> None:
    page = open_page(report)
    for _ in range(60):
        page.keyboard.press("Tab")
        outline = page.evaluate("""() => {
          const active = document.activeElement;
          const node = active.matches(".scrub") ? active.parentElement : active;
          const style = getComputedStyle(node);
          return [style.outlineStyle, parseFloat(style.outlineWidth), node.className];
        }""")
        assert outline[0] != "none" and outline[1] >= 1, outline


def test_the_first_stop_leads_to_the_content(report: Path, open_page: Open) -> None:
    page = open_page(report)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def printed(browser: Browser, file: Path, **context: object) -> tuple[int, str]:
    with watched(browser, file, **context) as page:
        reader = PdfReader(BytesIO(page.pdf(format="A4", print_background=True)))
        text = " ".join(page.extract_text() for page in reader.pages)
    return len(reader.pages), " ".join(normalize("NFKC", text).split())  # a ligature is one character in a PDF


def test_without_a_script_it_prints_all_of_it(browser: Browser, report: Path) -> None:
    pages, text = printed(browser, report, java_script_enabled=False)
    assert 3 <= pages <= 40
    for words in ("fast", "Overview", "Reward", "The KL jumped", "Next step", "Worst tokens", "<eos>", "learning_rate"):
        assert words in text
    for words in ("Dark theme", "Show more", "Step from"):
        assert words not in text
    assert printed(browser, report)[1].count("Step ") == text.count("Step "), "with a script it prints as many"


def test_paper_is_white_whatever_the_theme(browser: Browser, report: Path) -> None:
    with watched(browser, report, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        ink = page.evaluate("getComputedStyle(document.querySelector('h1')).color")
        assert sum(map(int, ink[4:-1].split(","))) < 150
        shade = "getComputedStyle(document.querySelector('.p1, .p2, .p3, .p4')).printColorAdjust"
        assert page.evaluate(shade) == "exact"


@pytest.mark.parametrize("which", ["report", "comparison"])
def test_paper_is_wide_enough_and_has_no_button(which: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    paper = {"width": 688, "height": 980}  # A4 within its margins, in CSS pixels
    with watched(browser, request.getfixturevalue(which), viewport=paper) as page:
        page.emulate_media(media="print")
        wide = page.locator("main table").evaluate_all(
            """(tables, most) => tables.filter(table => table.getBoundingClientRect().right > most + 1)
              .map(table => table.caption.textContent)""",
            paper["width"],
        )
        assert wide == []
        assert page.locator("button:visible").count() == 0


def test_without_a_script_the_page_is_whole(browser: Browser, report: Path) -> None:
    with watched(browser, report, java_script_enabled=False) as page:
        assert page.locator(".completion").count() > 25
        assert page.locator(".completion").last.is_visible()
        assert not page.locator("#filters").is_visible() and not page.locator("#theme").is_visible()
        page.locator("figure").first.locator("summary").click()
        assert page.locator("figure table").first.is_visible()


ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index.html", "from-scratch.html", "training.html", "do/steady-length.html", "alarms.html")
COLUMNS = """() => {
  const pen = document.createElement('canvas').getContext('2d');
  return [...document.querySelectorAll('pre > code')].map((code) => {
    const style = getComputedStyle(code);
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    const room = code.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return Math.floor(room / (pen.measureText('0'.repeat(100)).width / 100));
  });
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_pages_fit_their_window_and_code_its_block(browser: Browser, site: Path, width: int, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert min(page.evaluate(COLUMNS), default=999) >= {1280: 120, 800: 90, 400: 45}[width], name
        grounds = page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgba()").split(",")
        assert (sum(map(float, grounds[:3])) < 3 * 128) == (scheme == "dark"), name
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_the_first_screen_of_a_laptop_shows_the_check_and_its_verdict(browser: Browser, site: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "index.html").as_uri())
    article = page.locator("article")  # the navigation names klamp.check, too
    for shown in ("klamp.check", "klamp check: WRONG"):
        box = article.get_by_text(shown).first.bounding_box()
        assert box is not None and box["y"] + 40 < 800
    picture = page.locator("img[src$='language-tokens.png']").bounding_box()
    assert picture is not None and picture["width"] > 600
    page.close()
