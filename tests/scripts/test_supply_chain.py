"""The lock agrees with the pins, every licence is allowed, and an advisory is told from a database out of reach."""

from __future__ import annotations

import json
import re
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts.supply_chain import (
    BY_HAND,
    CONSTRAINTS,
    EXEMPT,
    LOCK,
    SILENT,
    by_hand,
    installed,
    licence_of,
    lock_of,
    pins,
    refused,
    text,
    verdict,
)

from scripts import supply_chain

# exact files ---------------------------------------------------------------------------------------------------------


def test_the_lock_has_the_pins_version_by_version() -> None:
    locked, wanted = pins(LOCK.read_text(encoding="utf-8")), pins(CONSTRAINTS.read_text(encoding="utf-8"))
    assert locked == {name: version for name, version in wanted.items() if name not in EXEMPT}, "run: make lock"
    assert wanted.keys() >= EXEMPT.keys()


def test_every_line_of_the_lock_has_a_hash() -> None:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(pins(LOCK.read_text(encoding="utf-8"))) > 100
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_a_lock_is_made_of_what_pip_reports() -> None:
    found = {
        "metadata": {"name": "Some_Name", "version": "1.2"},
        "download_info": {"archive_info": {"hashes": {"sha256": "ab" * 32}}},
    }
    lines = lock_of({"install": [found]}).splitlines()
    assert lines[-1] == f"some-name==1.2 --hash=sha256:{'ab' * 32}"
    assert any("Without a hash: torch" in line for line in lines[:-1])
    assert pins("\n".join(lines)) == {"some-name": "1.2"}


# licences ------------------------------------------------------------------------------------------------------------


def test_every_licence_that_is_installed_is_allowed() -> None:
    found = installed()
    assert refused(found) == {} and len(found) > 100
    assert found["numpy"][1].startswith("BSD-3-Clause") and found["torchrl"][1] == "MIT"


def test_what_was_decided_by_hand_is_needed_has_a_reason_and_is_on_the_page() -> None:
    page = supply_chain.PAGE.read_text(encoding="utf-8")
    for name, entry in by_hand().items():
        assert f"| {name} | {entry['licence']} | {entry['why']} |" in page
        assert len(entry["why"].split()) > 4
        assert name in pins(CONSTRAINTS.read_text(encoding="utf-8"))
    assert BY_HAND.exists() and text(installed()).count("| codespell |") == 1


@pytest.mark.parametrize(
    ("fields", "licence", "allowed"),
    [
        ({"License-Expression": "MIT"}, "MIT", True),
        ({"License-Expression": "MPL-2.0 AND (Apache-2.0 OR MIT)"}, "MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ({"License-Expression": "MIT OR GPL-3.0-only", "License": "MIT"}, "MIT OR GPL-3.0-only", False),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0", True),
        (
            {"License": "MIT OR Apache-2.0", "Classifier": "License :: OSI Approved :: MIT License"},
            "MIT OR Apache-2.0",
            True,
        ),
        ({"License": "see the file", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD", True),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, "GNU Affero", False),
        ({"License": "Proprietary"}, "Proprietary", False),
        ({}, "", False),
    ],
)
def test_a_licence_is_what_the_metadata_says(fields: dict[str, str], licence: str, allowed: bool) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    each: Any = SimpleNamespace(metadata=metadata)
    assert licence_of(each).startswith(licence)
    assert (refused({"some": ("1.0", licence_of(each))}) == {}) == allowed


def test_a_licence_that_is_not_allowed_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(supply_chain, "installed", lambda: {"some": ("1.0", "AGPL-3.0-only"), "other": ("2.0", "")})
    assert supply_chain.licences(record=False) == 1
    assert "some: AGPL-3.0-only" in (said := capsys.readouterr().err) and "other: unknown" in said


# advisories ----------------------------------------------------------------------------------------------------------

SOUND = {"name": "some", "version": "1.0", "vulns": []}
WEAK = {"name": "weak", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
SKIPPED = {"name": "own", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("every", "code", "words"),
    [
        ([SOUND], 0, "1 pins checked, 0 advisories"),
        ([SOUND, WEAK], 1, "weak 2.0: PYSEC-1, mended in 2.1\n2 pins checked, 1 advisories"),
        ([SOUND, SKIPPED], 0, "1 pins checked, 0 advisories; not in the database: own"),
        ([SKIPPED], 0, SILENT),
    ],
)
def test_an_advisory_is_a_failure(every: list[Any], code: int, words: str) -> None:
    assert verdict(code, json.dumps({"dependencies": every, "fixes": []}), "") == (code, words)


@pytest.mark.parametrize(
    ("err", "code"),
    [
        ("ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed", 0),
        ("urllib3.exceptions.MaxRetryError: Max retries exceeded", 0),
        ("requests.exceptions.ReadTimeout: Read timed out.", 0),
        ("usage: pip-audit: error: unrecognized arguments: --x", 1),
    ],
)
def test_a_database_out_of_reach_is_said_and_is_no_failure(err: str, code: int) -> None:
    found, said = verdict(1, "", err)
    assert found == code and err in said and (SILENT in said) == (code == 0)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1)])
def test_the_program_is_asked_about_the_pins(
    status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    program, told = tmp_path / "pip-audit", tmp_path / "told"
    out = json.dumps({"dependencies": [WEAK if status else SOUND]})
    program.write_text(f"#!/bin/sh\necho \"$@\" > {told}\necho '{out}'\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(supply_chain, "auditor", lambda: program)
    assert supply_chain.advisories() == code
    assert f"--requirement {CONSTRAINTS} --no-deps" in told.read_text(encoding="utf-8")
    monkeypatch.setattr(supply_chain, "auditor", lambda: None)
    assert supply_chain.advisories() == 0
    assert SILENT in capsys.readouterr().out
