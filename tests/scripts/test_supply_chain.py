"""The lock agrees with the pins, and every licence is allowed."""

import re
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest
from scripts.supply_chain import BY_HAND, CONSTRAINTS, EXEMPT, LOCK, by_hand, installed, licence_of, pins, refused, text

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
        ({"License-Expression": "MPL-2.0 AND (Apache-2.0 OR MIT)"}, "MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ({"License-Expression": "MIT OR GPL-3.0-only", "License": "MIT"}, "MIT OR GPL-3.0-only", False),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0", True),
        ({"License": "see the file", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD", True),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, "GNU Affero", False),
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
