"""The documentation's site in a real browser: code is not cut on a laptop, no page is wider than its window."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

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
    opened = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = opened.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert min(page.evaluate(COLUMNS), default=999) >= {1280: 120, 800: 90, 400: 45}[width], name
        grounds = page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgba()").split(",")
        assert (sum(map(float, grounds[:3])) < 3 * 128) == (scheme == "dark"), name
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    opened.close()


def test_the_first_screen_of_a_laptop_shows_the_check_and_its_verdict(browser: Browser, site: Path) -> None:
    opened = browser.new_context(viewport={"width": 1280, "height": 800})
    page = opened.new_page()
    page.goto((site / "index.html").as_uri())
    article = page.locator("article")  # the navigation names klamp.check, too
    for shown in ("klamp.check", "klamp check: WRONG"):
        box = article.get_by_text(shown).first.bounding_box()
        assert box is not None and box["y"] + 40 < 800
    picture = page.locator("img[src$='language-tokens.png']").bounding_box()
    assert picture is not None and picture["width"] > 600
    opened.close()
