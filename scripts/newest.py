#!/usr/bin/env python3
"""Runs the parity lists with the newest versions of today, and records the results.

    .venv-newest/bin/python scripts/newest.py [ARGUMENT OF PYTEST ...]     (make test-newest)

The lists compare klamp's numbers with a host's own, and bind the recipes of docs/hosts.md to the newest wheel of each
other trainer, unpacked into build/recipes. A trainer without a wheel is bound to $KLAMP_CHECKOUTS/NAME, or its tests
are NOT RUN. The versions, what passed and each failed test go into docs/records/index.md, under the day; a second run
on a day replaces the first. Exit status: pytest's. `make test-everything` leaves it out, because its record is about a
commit, and these results change without one.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE, REPORT = ROOT / "docs" / "records" / "index.md", ROOT / "build" / "newest.xml"
BEGIN, END = "<!-- newest: written by `make test-newest` -->", "<!-- end of newest -->"
LISTS = {
    "TRL": ("tests/hosts/trl", "tests/test_trl.py", "tests/training/in_trl"),
    "verl": ("tests/hosts/verl", *(f"tests/engines/verl/test_{name}.py" for name in ("hooks", "driver", "overrides"))),
    "Tinker": ("tests/contracts/test_parity_tinker.py",),
    "other trainers": ("tests/docs/test_recipes.py",),
}
PACKAGES = ("trl", "verl", "tinker", "transformers", "torch", "accelerate", "peft", "tensordict")
RECIPES = ROOT / "build" / "recipes"
WHEELS = {
    "OpenRLHF": "openrlhf",
    "SkyRL": "skyrl",
    "ms-swift": "ms-swift",
    "AReaL": "areal",
    "Trinity-RFT": "trinity-rft",
    "torchtitan": "torchtitan",
}
"""Trainer of docs/hosts.md -> its package."""


def fetch_wheels() -> None:
    """Unpack the newest wheel of each trainer, without its dependencies: the tests parse it and import nothing."""
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-compile", "--quiet", "--target"]
    for trainer, package in WHEELS.items():
        shutil.rmtree(RECIPES / trainer, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", *options, str(RECIPES / trainer), package]
        subprocess.run(command, cwd=ROOT, check=False)  # without a network its tests are NOT RUN


def section(day: str, report: Path) -> str:
    """What a run found, as a section of the page.

    Args:
        day: of the run.
        report: pytest's, in JUnit's form.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))  # our own file
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    wheels = ", ".join(x.stem.replace("-", " ") for x in sorted(RECIPES.glob("*/*.dist-info")))
    lines = [f"### {day}", "", f"{versions}.", "", f"Recipes of docs/hosts.md: {wheels or 'no wheel'}.", ""]
    lines.append(f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped.")
    for case in failed:
        (found,) = [each for each in case if each.tag in ("failure", "error")]
        said = " ".join(str(found.get("message")).split())[:160]
        lines.append(f"- `{case.get('classname')}::{case.get('name')}`: {said}")
    return "\n".join(lines)


def page_of(page: str, day: str, found: str) -> str:
    """The page with a section of this day, the newest first."""
    head, rest = page.split(BEGIN)
    days, _, tail = rest.partition(END)
    kept = [each.strip() for each in re.split(r"(?m)^(?=### )", days) if not each.startswith(f"### {day}\n")]
    return "\n\n".join([f"{head}{BEGIN}", found, *filter(None, kept), f"{END}{tail}"])


def main() -> None:
    files = [file for several in LISTS.values() for file in several]
    REPORT.parent.mkdir(exist_ok=True)
    fetch_wheels()
    command = [sys.executable, "-m", "pytest", "-m", "not slow", f"--junitxml={REPORT}", *files, *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not sys.argv[1:]:  # a part of the lists is no record
        day = str(datetime.date.today())
        PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), day, section(day, REPORT)), encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
