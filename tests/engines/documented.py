"""The table of docs/audit.md is what the audit measures, row for row."""

import json
import tomllib

from scripts.audit_page import PAGE, READ, RECORD, measured, page

from klamp.audit import load_subject
from klamp.cli.audit import LEGEND


def assert_documented(*names: str) -> None:
    """The record holds what `klamp audit NAME` measures, and the page shows the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in names:
        subject = load_subject(name)
        assert (record[name]["title"], record[name]["rows"]) == (subject.title, measured(subject))
    text = PAGE.read_text(encoding="utf-8")
    assert page(record, tomllib.loads(READ.read_text(encoding="utf-8"))) in text
    assert LEGEND in text
