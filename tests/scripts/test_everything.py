"""Everything, once: which targets there are, which of them need not be run again, what the record says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scripts.everything import BEGIN, END, PAGE, TARGETS, counts, counts_still, page_of, text

from scripts import everything

ROOT = Path(__file__).resolve().parents[2]
ROW: dict[str, Any] = {
    "target": "test-verl",
    "passed": True,
    "tests": 261,
    "skipped": 2,
    "failed": 0,
    "seconds": 954,
    "commit": "c31f1ea" * 5,
    "date": "2026-11-25",
    "processor": "A Processor (avx2), 2 cores",
}


def test_every_target_that_tests_is_among_them() -> None:
    declared = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert declared is not None
    named = {name for name in declared[1].split() if re.fullmatch(r"test(-\w+)?|fuzz|mutants", name)}
    assert named - {"test-everything"} == set(TARGETS)


def test_tests_are_counted_in_the_runner_s_own_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite errors="1" failures="2" skipped="3" tests="20"/></testsuites>')
    assert counts(report, "") == {"tests": 17, "skipped": 3, "failed": 3}
    log = "  0.1 min    1/40 caught     core/a.py\n  0.4 min    2/40 alive      core/b.py\nOf 2 mutants\n"
    assert counts(tmp_path / "none.xml", log) == {"tests": 2, "skipped": 0, "failed": 0}


@pytest.mark.parametrize(
    ("passed", "differs", "later", "still"),
    [(True, False, False, True), (True, True, False, False), (True, True, True, True), (False, False, True, False)],
    ids=["same commit", "another commit", "since", "failed"],
)
def test_what_passed_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, passed: bool, differs: bool, later: bool, still: bool
) -> None:
    answers = {"diff": int(differs), "merge-base": int(not later)}

    class Answer:
        def __init__(self, *words: str) -> None:
            self.returncode = answers[words[0]]

    monkeypatch.setattr(everything, "git", Answer)
    assert counts_still({**ROW, "passed": passed}, "another", since="a commit") is still
    assert not counts_still({**ROW, "passed": passed}, "another", since=None) or not differs


def test_the_record_names_target_tests_seconds_commit_and_day() -> None:
    said = text({"test-verl": ROW, "test": {**ROW, "target": "test", "passed": False, "failed": 3}})
    assert said.startswith("On A Processor (avx2), 2 cores.")
    assert f"| `test-verl` | {TARGETS['test-verl']} | 261 | 2 | 954 | `c31f1eac31` | 2026-11-25 | passed |" in said
    assert "| **3 failed** |" in said and "Not run: `test-slow`" in said


def test_the_page_keeps_what_stands_around_the_record() -> None:
    page = f"before\n{BEGIN}\n\nold\n\n{END}\nafter"
    assert page_of(page, {"test-verl": ROW}) == f"before\n{BEGIN}\n\n{text({'test-verl': ROW})}\n\n{END}\nafter"
    assert PAGE.read_text(encoding="utf-8").count(BEGIN) == 1
