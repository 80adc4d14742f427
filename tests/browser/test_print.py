"""On paper, and without any script, the content is there."""

from io import BytesIO
from pathlib import Path
from unicodedata import normalize

import pytest
from playwright.sync_api import Browser
from pypdf import PdfReader
from tests.browser.conftest import watched


def printed(browser: Browser, file: Path, **context: object) -> tuple[int, str]:
    with watched(browser, file, **context) as page:
        reader = PdfReader(BytesIO(page.pdf(format="A4", print_background=True)))
        text = " ".join(page.extract_text() for page in reader.pages)
    return len(reader.pages), " ".join(normalize("NFKC", text).split())  # a ligature is one character in a PDF


def test_without_a_script_it_prints_all_of_it(browser: Browser, report: Path) -> None:
    pages, text = printed(browser, report, java_script_enabled=False)
    assert 3 <= pages <= 40
    for words in ("fast", "Overview", "Reward", "The KL jumped", "Next step", "KL to the reference"):
        assert words in text
    for words in ("Worst tokens", "Step 1, completion 1", "<eos>", "learning_rate", "torch"):
        assert words in text
    for words in ("Dark theme", "Show more", "Step from"):
        assert words not in text
    assert printed(browser, report)[1].count("Step ") == text.count("Step "), "with a script it prints as many"


def test_paper_is_white_whatever_the_theme(browser: Browser, report: Path) -> None:
    with watched(browser, report, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        ink = page.evaluate("getComputedStyle(document.querySelector('h1')).color")
        assert sum(map(int, ink[4:-1].split(","))) < 150
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.p1, .p2, .p3, .p4')).printColorAdjust") == "exact"
        )


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
