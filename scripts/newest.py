#!/usr/bin/env python3
"""Runs the parity lists with the newest versions of today, and writes down what was found.

    .venv-newest/bin/python scripts/newest.py [ARGUMENT OF PYTEST ...]     (make test-newest)

The lists are those that hold klamp's numbers to a host's own. What was installed, what passed and each test that failed
goes into docs/records/newest.md, under the day; a day that is there is written anew. Exit status: pytest's. It is no
part of `make test-everything`, whose record is about a commit: what this finds changes without one.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE, REPORT = ROOT / "docs" / "records" / "newest.md", ROOT / "build" / "newest.xml"
LISTS = {
    "TRL": ("tests/hosts/trl", "tests/test_trl.py", "tests/training/in_trl"),
    "verl": ("tests/hosts/verl", *(f"tests/engines/verl/test_{name}.py" for name in ("hooks", "driver", "overrides"))),
    "Tinker": ("tests/contracts/test_parity_tinker.py",),
}
PACKAGES = ("trl", "verl", "tinker", "transformers", "torch", "accelerate", "peft", "tensordict")


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
    lines = [f"## {day}", "", f"{versions}.", ""]
    lines.append(f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped.")
    for case in failed:
        (found,) = [each for each in case if each.tag in ("failure", "error")]
        said = " ".join(str(found.get("message")).split())[:160]
        lines.append(f"- `{case.get('classname')}::{case.get('name')}`: {said}")
    return "\n".join(lines)


def page_of(page: str, day: str, found: str) -> str:
    """The page with a section of this day, the newest first."""
    head, *others = re.split(r"(?m)^(?=## )", page)
    kept = [each.strip() for each in others if not each.startswith(f"## {day}\n")]
    return "\n\n".join([head.strip(), found, *kept]) + "\n"


def main() -> None:
    files = [file for several in LISTS.values() for file in several]
    REPORT.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", f"--junitxml={REPORT}", *files, *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not sys.argv[1:]:  # a part of the lists is no record
        day = str(datetime.date.today())
        PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), day, section(day, REPORT)), encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
