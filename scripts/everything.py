#!/usr/bin/env python3
"""Runs every target of the Makefile that checks something, one after the other, and records what became of each.

    scripts/everything.py [TARGET ...] [--since COMMIT] [--again]     (make test-everything EVERYTHING_ARGS='...')

A target that passed on this commit is not run again, so that a run that was ended goes on with the next target; what
passed on a commit since which no more than the record's own page changed counts too, and with --since what passed on
COMMIT or later. --again forgets that. A target that fails does not stop the others. What each printed is in
build/everything/TARGET.log; what became of it is kept beside that and shown in docs/records/index.md: tests,
seconds, commit, day and processor. Exit status 1: a target failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "everything"
PAGE = ROOT / "docs" / "records" / "index.md"
BEGIN, END = "<!-- everything: written by `make test-everything` -->", "<!-- end of everything -->"

TARGETS = {
    "test": "the gate's checks: lint, types, imports, documentation, tests on a CPU",
    "test-slow": "whole programs and runs, what a run has learned, a hundred kills, memory",
    "test-report": "the report in a real Chromium",
    "test-wheel": "the wheel as pip installs it",
    "test-pythons": "the wheel on the other Pythons",
    "test-language": "SmolLM2-135M",
    "test-verl": "verl on a local Ray cluster, with FSDP2 and vLLM",
    "test-vllm": "a real vLLM, DeepSpeed and verifiers",
    "test-unsloth": "TRL as Unsloth patches it",
    "test-oldest": "the oldest versions of all libraries that are declared",
    "test-numeric": "the numeric tests with other instructions, threads, and another built-in model",
    "fuzz": "other inputs than those that the gate draws, five times as many",
    "mutants": "small mistakes put into the code: which do the tests notice?",
}
VARIABLES = {"mutants": "MUTANTS_ARGS=--number 40"}
"""Beside PYTEST_ARGS; a whole sample of mutants takes 40 minutes, and has a record of its own."""
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
MUTANT = re.compile(r"^ *[\d.]+ min +\d+/\d+ \w+", re.M)

Row = dict[str, Any]


def counts(report: Path, log: str) -> Row:
    """How many tests a target ran, and how many of these were skipped or failed; for mutants, how many were tried."""
    if not report.exists():
        return {"tests": len(MUTANT.findall(log)), "skipped": 0, "failed": 0}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))  # our own file
    total = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped", "failures", "errors")}
    return {
        "tests": total["tests"] - total["skipped"],
        "skipped": total["skipped"],
        "failed": total["failures"] + total["errors"],
    }


def run(target: str, commit: str) -> Row:
    """Run a target, its words on the terminal and in its log; the row of what became of it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, log = FOLDER / f"{target}.xml", FOLDER / f"{target}.log"
    report.unlink(missing_ok=True)
    command = ["make", target, f"PYTEST_ARGS=--junitxml={report}"]
    command += [VARIABLES[target]] if target in VARIABLES else []
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            file.write(line)
    found = counts(report, log.read_text(encoding="utf-8"))
    row = {"target": target, "passed": process.wait() == 0, **found, "seconds": round(time.monotonic() - begin)}
    row |= {"commit": commit, "date": str(datetime.date.today()), "processor": processor()}
    (FOLDER / f"{target}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


def processor() -> str:
    """The processor's name and what decides over its arithmetic, and how many cores it has."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name, flags = (re.search(rf"^{key}\s*: (.*)$", told, re.M) for key in ("model name", "flags"))
    units = [unit for unit in UNITS if flags and unit in flags[1].split()]
    return f"{name[1] if name else platform.machine()} ({', '.join(units)}), {os.cpu_count()} cores"


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def unchanged(old: str, new: str) -> bool:
    """Whether nothing but the record's own page differs between two commits."""
    page = PAGE.relative_to(ROOT)
    return old == new or git("diff", "--quiet", old, new, "--", ".", f":!{page}").returncode == 0


def counts_still(row: Mapping[str, Any], commit: str, since: str | None) -> bool:
    """Whether a target need not be run again."""
    if not row["passed"]:
        return False
    later = since is not None and git("merge-base", "--is-ancestor", since, row["commit"]).returncode == 0
    return later or unchanged(row["commit"], commit)


def kept() -> dict[str, Row]:
    """What became of the targets that were run here."""
    files = [FOLDER / f"{target}.json" for target in TARGETS]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| target | what | tests | skipped | seconds | commit | day | |", "| --- " * 8 + "|"]
    for row in rows:
        became = "passed" if row["passed"] else f"**{row['failed'] or 'the target'} failed**"
        cells = (row["tests"], row["skipped"], row["seconds"], f"`{row['commit'][:10]}`", row["date"], became)
        lines.append(f"| `{row['target']}` | {TARGETS[row['target']]} | {' | '.join(f'{cell}' for cell in cells)} |")
    return "\n".join(lines)


def text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What the page says of the rows: on which processors they were made, and the table."""
    processors = sorted({row["processor"] for row in rows.values()})
    missing = [f"`{target}`" for target in TARGETS if target not in rows]
    lines = [f"On {'; '.join(processors)}.", "", table(rows.values())]
    return "\n".join([*lines, *(["", f"Not run: {', '.join(missing)}."] if missing else [])])


def page_of(page: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its part on everything written anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{text(rows)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all where none is named"
    )
    parser.add_argument("--since", metavar="COMMIT", help="what passed on this commit or later counts")
    parser.add_argument("--again", action="store_true", help="run what passed, too")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"no target is named {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}").stdout:
        parser.error("there are changes that are in no commit; the record names a commit, so commit them first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    for target in args.targets or TARGETS:
        before = kept().get(target)
        if before is not None and not args.again and counts_still(before, commit, args.since):
            print(f"== {target}: passed on {before['commit'][:10]}, not run again", flush=True)
            continue
        row = run(target, commit)
        print(f"== {target}: {'passed' if row['passed'] else 'FAILED'}, {row['seconds']} s", flush=True)
    rows = kept()
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(table(rows.values()))
    sys.exit(any(not row["passed"] for row in rows.values()))


if __name__ == "__main__":
    main()
