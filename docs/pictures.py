"""Makes the pictures of the README and the documentation from a language study: `python docs/pictures.py FOLDER`.

FOLDER is that of `klamp ablate language`. Written are docs/language-frontier.png (the ablation's own picture),
docs/language-answers.png and docs/language-tokens.png (parts of `klamp report` of three of its runs, in a browser).
"""

from __future__ import annotations

import argparse  # noqa: TID251  (a program of its own)
import shutil
import subprocess
from pathlib import Path

from playwright.sync_api import sync_playwright

from klamp.ablation.language import language_plan
from klamp.ablation.plan import folder_name
from klamp.cli import main as klamp

DOCS = Path(__file__).resolve().parent
ARMS = tuple(arm.name for arm in language_plan().arms)
"""The arms that are shown side by side, with seed 0."""
QUESTIONS = 2
"""Questions of each skill that are shown of the table of answers."""
COMPLETIONS = 4
"""Completions that are shown token by token, the worst first."""
REST = """(table, most) => {
  const seen = {};
  for (const row of [...table.tBodies[0].rows]) {
    const skill = row.querySelector("small").textContent;
    seen[skill] = (seen[skill] ?? 0) + 1;
    if (seen[skill] > most) row.remove();
  }
}"""
"""Removes the questions beyond that."""


def main(folder: Path) -> None:
    """Make all pictures.

    Args:
        folder: of the study.
    """
    shutil.copy(folder / "frontier.png", DOCS / "language-frontier.png")
    page = folder / "pictures.html"
    runs = [str(folder / "runs" / f"{folder_name(arm)}_seed-0") for arm in ARMS]
    if klamp(["report", *runs, "--output", str(page)]):
        raise SystemExit("no report was written")
    browser = subprocess.run(
        [DOCS.parent / "scripts" / "chromium.sh", "--find"], capture_output=True, text=True, check=True
    )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=browser.stdout.strip(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        shown = running.new_page(viewport={"width": 1280, "height": 900})
        shown.goto(page.absolute().as_uri())
        shown.locator("header.bar").evaluate("bar => bar.remove()")  # it would lie over what is photographed
        shown.locator("table.answers").evaluate(REST, QUESTIONS)
        shown.locator("table.answers").screenshot(path=DOCS / "language-answers.png")
        shown.locator("#completions").evaluate(
            "(list, most) => [...list.children].slice(most).forEach(card => card.remove())", COMPLETIONS
        )
        shown.locator("#tokens").screenshot(path=DOCS / "language-tokens.png")
        running.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of the README and the documentation.")
    parser.add_argument("folder", type=Path, help="of `klamp ablate language`")
    main(parser.parse_args().folder)
