#!/usr/bin/env python3
"""What the development environment takes from others: exact files, licences, known weaknesses.

    scripts/supply_chain.py lock         the pins of constraints.txt with the hash of each file -> requirements-dev.lock
    scripts/supply_chain.py licences     what is installed here, and under which licence; --record shows it in the docs
    scripts/supply_chain.py advisories   pip-audit, in an environment of its own, over constraints.txt

`lock` asks pip, and so the index that pip is set to. Exit status 1: a licence that is unknown or not allowed, or an
advisory. Where no database of advisories can be reached, that is said, and nothing has failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements-dev.lock"
BY_HAND = Path(__file__).with_name("licences.toml")
PAGE = ROOT / "docs" / "records" / "index.md"
BEGIN, END = "<!-- licences: written by `make licences LICENCES_ARGS=--record` -->", "<!-- end of licences -->"
AUDIT, PIP_AUDIT = ROOT / "build" / "audit", "pip-audit==2.10.1"

EXEMPT = {"torch": "a build for the CPU that is at hand is taken as it is, and is another file than the index's"}
"""Pins without a hash, and why."""
OURS = {"klamp", "klamp-standin"}

# --- exact files ----------------------------------------------------------------------------------------------


def pins(text: str) -> dict[str, str]:
    """Name -> version of the lines `name==version` of a requirements file."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def lock_of(report: Mapping[str, Any]) -> str:
    """The lines with hashes for what pip's report says that it would install."""
    entries: dict[str, str] = {}
    for each in report["install"]:
        name, version = canonicalize_name(each["metadata"]["name"]), each["metadata"]["version"]
        entries[name] = f"{name}=={version} --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}"
    where = f"Python {platform.python_version().rpartition('.')[0]}, {platform.system()}, {platform.machine()}"
    head = (
        "# Written by `make lock` from constraints.txt: the files that pip takes for it, for " + where + ".",
        "# To install from it:",
        "#   pip install torch --constraint constraints.txt",
        "#   pip install --no-deps --require-hashes --requirement requirements-dev.lock",
        "#   pip install --no-deps --editable . --editable ./standin",
        *(f"# Without a hash: {name}, since {why}." for name, why in EXEMPT.items()),
    )
    return "\n".join([*head, *(entries[name] for name in sorted(entries)), ""])


def lock() -> int:
    """Write the lock."""
    wanted = {name: version for name, version in pins(CONSTRAINTS.read_text()).items() if name not in EXEMPT}
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        file.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()), encoding="utf-8")
        asked = ("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
        subprocess.run([sys.executable, "-m", "pip", *asked, "--requirement", str(file)], check=True)
        LOCK.write_text(lock_of(json.loads(report.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {LOCK.name}: {len(pins(LOCK.read_text()))} of {len(wanted)} pins")
    return 0


# --- licences -------------------------------------------------------------------------------------------------

ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC"),
    *("LLVM-exception", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib"),
}
"""What asks for no more than to be named, and MPL-2.0, which asks for its own files to stay open."""
IN_WORDS = {
    r"(the )?mit( license)?( \(mit\))?": "MIT",
    r"apache( software)?( license)?,?( version)? ?(2\.0)?( license)?": "Apache-2.0",
    r"bsd( license)?": "BSD",
    r"(bsd )?3-clause( bsd)? license|bsd-3-clause": "BSD-3-Clause",
    r"bsd[ -]2-clause( license)?": "BSD-2-Clause",
    r"isc license( \(iscl\))?": "ISC",
    r"python software foundation license": "PSF-2.0",
    r"mozilla public license 2\.0 \(mpl 2\.0\)": "MPL-2.0",
}
"""How authors write it, in small letters -> its name."""
OPERATORS = {"AND", "OR", "WITH"}


def named(text: str) -> str:
    """The name of a licence that is written in words; what is a name already stays."""
    plain = " ".join(text.split())
    return next((name for words, name in IN_WORDS.items() if re.fullmatch(words, plain.lower())), plain)


def licence_of(each: Distribution) -> str:
    """The licence of a distribution by its own word: its expression, field or classifiers; "" where there is none."""
    metadata = each.metadata
    classifiers = [
        c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or () if c.startswith("License :: OSI")
    ]
    field = named((metadata.get("License") or "").strip().partition("\n")[0])
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    if field and not names_in(field) - ALLOWED:
        return field
    return " AND ".join(sorted({named(text) for text in classifiers})) or field[:60]


def names_in(expression: str) -> set[str]:
    """The licences that an SPDX expression names."""
    return set(re.findall(r"[^\s()]+", expression)) - OPERATORS


def by_hand() -> dict[str, dict[str, str]]:
    """What was looked up or decided by a person: name -> licence and why."""
    return {
        canonicalize_name(name): entry for name, entry in tomllib.loads(BY_HAND.read_text(encoding="utf-8")).items()
    }


def installed() -> dict[str, tuple[str, str]]:
    """What is installed here, but klamp and its stand-in: name -> version and licence."""
    found = {canonicalize_name(each.name): (each.version, licence_of(each)) for each in distributions()}
    known = {name: entry["licence"] for name, entry in by_hand().items()}
    return {name: (version, known.get(name, own)) for name, (version, own) in sorted(found.items()) if name not in OURS}


def refused(found: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Those whose licence is unknown or not allowed -> that licence."""
    decided = by_hand()
    return {
        name: licence or "unknown"
        for name, (_, licence) in found.items()
        if name not in decided and (not licence or names_in(licence) - ALLOWED)
    }


def text(found: Mapping[str, tuple[str, str]]) -> str:
    """What the page says: how many there are of each licence, and what was decided by hand."""
    counts = Counter(licence for _, licence in found.values()).most_common()
    rows = [f"| {licence} | {count} |" for licence, count in sorted(counts, key=lambda row: (-row[1], row[0]))]
    decided = [f"| {name} | {entry['licence']} | {entry['why']} |" for name, entry in by_hand().items()]
    return "\n".join(
        (
            f"{len(found)} distributions in the environment of `make install`:",
            "",
            "| licence | distributions |",
            "| --- | --- |",
            *rows,
            "",
            "By hand, in `scripts/licences.toml`:",
            "",
            "| distribution | licence | why |",
            "| --- | --- | --- |",
            *decided,
        )
    )


def licences(*, record: bool) -> int:
    """Print what is installed with its licence."""
    found = installed()
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {version:<14} {licence}" for name, (version, licence) in found.items()))
    if record:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        page = f"{head}{BEGIN}\n\n{text(found)}\n\n{END}{rest.partition(END)[2]}"
        PAGE.write_text(page, encoding="utf-8")
    for name, licence in refused(found).items():
        print(f"not allowed, or unknown: {name}: {licence}", file=sys.stderr)
    return int(bool(refused(found)))


# --- advisories -----------------------------------------------------------------------------------------------

UNREACHED = re.compile(
    r"could not connect|blocking this service|time(d |-)?out|max retries|(Connection|Proxy|SSL|Service)Error", re.I
)
"""What pip-audit and pip say where they reach nobody."""
SILENT = "no database of advisories can be reached from here: nothing was checked"


def auditor() -> Path | None:
    """The program pip-audit, installed where it is not yet; None: it cannot be had from here."""
    program = AUDIT / "bin" / "pip-audit"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(AUDIT)], check=True)
        python = AUDIT / "bin" / "python"
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", PIP_AUDIT], check=False)
        return program if done.returncode == 0 else None
    return program


def verdict(code: int, out: str, err: str) -> tuple[int, str]:
    """What pip-audit found: an exit status, and what to say.

    Args:
        code: its own status, which is 1 for an advisory and for whatever went wrong.
        out: what it wrote as JSON.
        err: what it said.
    """
    try:
        every = json.loads(out)["dependencies"]
    except (ValueError, TypeError, KeyError):
        if UNREACHED.search(err):
            return 0, f"{SILENT}\n{err.strip()}"
        return code or 2, f"pip-audit failed\n{err.strip()}"
    checked = [each for each in every if "skip_reason" not in each]
    if not checked:
        return 0, SILENT
    lines = [
        f"{each['name']} {each['version']}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'no version'}"
        for each in checked
        for known in each["vulns"]
    ]
    unknown = [each["name"] for each in every if "skip_reason" in each]
    note = f"; not in the database: {', '.join(unknown)}" if unknown else ""
    return int(bool(lines)), "\n".join([*lines, f"{len(checked)} pins checked, {len(lines)} advisories{note}"])


def advisories() -> int:
    """Ask whether a weakness of a pin is known."""
    program = auditor()
    if program is None:
        print(f"pip-audit cannot be installed from here: {SILENT}")
        return 0
    words = ("--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip", "--format", "json")
    done = subprocess.run([program, *words, "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    code, said = verdict(done.returncode, done.stdout, done.stderr)
    print(said)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lock", "licences", "advisories"))
    parser.add_argument("--record", action="store_true", help="licences: write the counts into docs/records/index.md")
    args = parser.parse_args()
    if args.what == "licences":
        return licences(record=args.record)
    return lock() if args.what == "lock" else advisories()


if __name__ == "__main__":
    sys.exit(main())
