"""Makes the pictures of the README and the documentation, in a browser (scripts/chromium.sh).

`python docs/pictures.py language FOLDER` writes docs/language-frontier.png (the ablation's own picture),
docs/language-answers.png and docs/language-tokens.png (parts of `klamp report` of three of its runs). FOLDER is that of
`python -m studies.language`.

`python docs/pictures.py report RUN` writes docs/report.png (the top of its report) and docs/report-tokens.png (tokens,
in the dark, with one read out). RUN is that of docs/report.md, by its name there: runs/held.
"""

from __future__ import annotations

import argparse  # noqa: TID251  (a program of its own)
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from PIL import Image, ImageOps
from playwright.sync_api import Page, sync_playwright

from klamp.cli import main as klamp
from klamp.cli.ablate import parse_ablate
from klamp.lab.ablate.plan import folder_name

DOCS = Path(__file__).resolve().parent
QUESTIONS = 2
"""Questions of each skill that are shown of the table of answers."""
WORST, COMPLETIONS, MARGIN = 6, 3, 24
"""Rows of the worst tokens, completions that are shown token by token, and pixels around them."""
REST = """(table, most) => {
  const seen = {};
  for (const row of [...table.tBodies[0].rows]) {
    const skill = row.querySelector("small").textContent;
    seen[skill] = (seen[skill] ?? 0) + 1;
    if (seen[skill] > most) row.remove();
  }
}"""
"""Removes the questions beyond that."""
FEWER = """(section, [worst, most]) => {
  const rows = [...section.querySelector("table.worst").tBodies[0].rows];
  const cards = [...section.querySelector("#completions").children];
  const controls = section.querySelectorAll("#filters, #count, #more");
  for (const part of [...rows.slice(worst), ...cards.slice(most), ...controls]) part.remove();
}"""
"""Removes the rows and completions beyond that, and what only a live page can use."""


WIDTH, TOP = 860, 1330
"""Width of the pictures of one report, near a page's own; height of its top: headlines, and the first charts."""


def language(folder: Path) -> None:
    """Make the pictures of a language study: its arms side by side, with seed 0.

    Args:
        folder: of the study.
    """
    shutil.copy(folder / "frontier.png", DOCS / "language-frontier.png")
    plan, _ = parse_ablate(["--plan", str(folder / "plan.yaml")])
    runs = [folder / "runs" / f"{folder_name(arm.name)}_seed-0" for arm in plan.arms]
    with opened(*runs, file=folder / "pictures.html") as shown:
        shown.locator("header.bar").evaluate("bar => bar.remove()")  # it would lie over what is photographed
        shown.locator("table.answers").evaluate(REST, QUESTIONS)
        shown.locator("table.answers").screenshot(path=DOCS / "language-answers.png")
        tokens, file = shown.locator("#tokens"), DOCS / "language-tokens.png"
        tokens.evaluate(FEWER, [WORST, COMPLETIONS])
        tokens.screenshot(path=file)
    picture = Image.open(file).convert("RGB")
    paper = picture.getpixel((0, 0))
    assert isinstance(paper, tuple)
    ImageOps.expand(picture, MARGIN, paper).quantize(256).save(file, optimize=True)


def report(run: Path) -> None:
    """Make the pictures of a report of one run.

    Args:
        run: its folder.
    """
    file = run / "pictures.html"
    with opened(run, file=file, width=WIDTH, height=TOP) as shown:
        photograph(shown, DOCS / "report.png")
    with opened(run, file=file, width=WIDTH, height=780, theme="dark") as shown:
        shown.locator("#all-completions").evaluate(
            "heading => scrollTo(0, heading.getBoundingClientRect().top + scrollY - 120)"
        )
        shown.locator(".completion").nth(1).locator(".tokens span").first.hover()
        photograph(shown, DOCS / "report-tokens.png")


def photograph(page: Page, file: Path) -> None:
    """Write what a page shows, in 256 colours: a third of the bytes.

    Args:
        page: in the browser.
        file: a PNG.
    """
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)


@contextmanager
def opened(
    *runs: Path, file: Path, width: int = 1280, height: int = 900, theme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """The report of some runs in a browser.

    Args:
        runs: their folders.
        file: where the report is written.
        width: of the window.
        height: of the window.
        theme: of the page.
    """
    if klamp(["report", *map(str, runs), "--output", str(file)]):
        raise SystemExit("no report was written")
    browser = subprocess.run(
        [DOCS.parent / "scripts" / "chromium.sh", "--find"], capture_output=True, text=True, check=True
    )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=browser.stdout.strip(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        shown = running.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        shown.goto(file.absolute().as_uri())
        yield shown
        running.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of the README and the documentation.")
    parser.add_argument("what", choices=("language", "report"))
    parser.add_argument("folder", type=Path, help="of `python -m studies.language`, or of a run")
    given = parser.parse_args()
    {"language": language, "report": report}[given.what](given.folder)
