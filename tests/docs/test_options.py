"""The page of a host says of every field of the configuration what the host does with it."""

from __future__ import annotations

import re
from dataclasses import fields
from fnmatch import fnmatch

import pytest
from tests.docs.pages import DOCS

from klamp.config import KLConfig

FIELDS = [field.name for field in fields(KLConfig)]


@pytest.mark.parametrize("host", ["trl", "verl"])  # Unsloth's page lists what differs from TRL's
def test_every_field_stands_in_the_table_of_options(host: str) -> None:
    page = (DOCS / f"{host}.md").read_text(encoding="utf-8")
    table = page.partition("## Every option\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w*]+)(?:=[^`]*)?`", table)
    assert [field for field in FIELDS if not any(fnmatch(field, name) for name in named)] == []
