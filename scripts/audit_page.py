"""Writes the table of docs/audit.md: measured by the audit, with what was read beside it.

`python -m scripts.audit_page NAME ...` measures what is installed, `--folder FOLDER NAME ...` checkouts as in
`scripts.fetched_trainers`, and stores the rows in docs/records/audit.json; without a name it only writes the page.
Places, versions and advice are in docs/records/audit.toml.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.audit import load_subject
from klamp.audit.examine import Subject, audit
from klamp.cli.audit import percent

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD, READ, PAGE = DOCS / "records" / "audit.json", DOCS / "records" / "audit.toml", DOCS / "audit.md"
BEGIN, END = "<!-- audit: written by `python -m scripts.audit_page` -->", "<!-- end of audit -->"
HEADINGS = ("project", "loss", "promises", "follows", "off", "off-policy", "verdict", "since", "place", "instead")
VERDICTS = {True: "follows", False: "does not", None: "cannot tell"}


def measured(subject: Subject) -> list[dict[str, Any]]:
    """One row per loss of a subject."""
    rows = []
    for loss, verdict in zip(subject.losses, audit(subject).values(), strict=True):
        codes = dict.fromkeys(x.code for x in verdict.findings if x.level != "note")
        row = {"loss": loss.name, "promises": loss.means, "follows": verdict.kl or "-"}
        row |= {"off": percent(loss.distances[0]), "off-policy": percent(loss.distances[1])}
        rows.append(row | {"mean": verdict.mean or "-", "verdict": VERDICTS[verdict.ok], "findings": [*codes]})
    return rows


def table(record: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    yield from ("| " + " | ".join(HEADINGS) + " |", "| " + " | ".join("---" for _ in HEADINGS) + " |")
    for project, entry in record.items():
        facts = read.get(project, [])
        for row in entry["rows"]:
            cells = row | {key: _fact(facts, key, row["loss"]) for key in ("since", "place", "instead")}
            cells |= {"project": project, "loss": f"`{row['loss']}`"}
            if row["findings"]:
                cells["verdict"] += ": " + ", ".join(f"`{code}`" for code in row["findings"])
            if row["verdict"] == "follows" and "no-ratio" not in row["findings"]:
                cells["instead"] = ""
            cells |= {
                key: x
                for fact in facts
                if fact.get("override") and _fits(fact, row["loss"])
                for key, x in fact["override"].items()
            }
            yield "| " + " | ".join(str(cells[heading]).replace("|", "\\|") for heading in HEADINGS) + " |"


def _fits(fact: Mapping[str, Any], loss: str) -> bool:
    return all(word in loss for word in fact.get("loss", []))


def _fact(facts: Sequence[Mapping[str, Any]], key: str, loss: str) -> str:
    """What the first fitting entry says."""
    return next((fact[key] for fact in facts if key in fact and _fits(fact, loss)), "")


def page(record: Mapping[str, Any], read: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    rows = [row for entry in record.values() for row in entry["rows"]]
    counts = {word: sum(row["verdict"] == word for row in rows) for word in VERDICTS.values()}
    days = sorted({entry["day"] for entry in record.values()})
    head = (
        f"Measured {days[0]}" + f" to {days[-1]}" * (len(days) > 1) + f": {len(record)} projects, {len(rows)} losses; "
    )
    head += ", ".join(f"{count} {word}" for word, count in counts.items()) + "."
    commands = [f"- {entry['title']}: `{entry['command']}`" for entry in record.values()]
    return "\n".join([BEGIN, "", head, "", *commands, "", *table(record, read), "", END])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is named, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.audit_page")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args(argv)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in arguments.names:
        if arguments.folder:
            from scripts.fetched_trainers import subject_of

            subject, command = (
                subject_of(name, (arguments.folder / name).resolve()),
                f"python -m scripts.fetched_trainers FOLDER {name}",
            )
        else:
            subject, command = load_subject(name), f"klamp audit {name}"
        day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        record[name] = {"title": subject.title, "day": day, "command": command, "rows": measured(subject)}
    entries = ",\n".join(
        f'"{name}": ' + json.dumps(entry | {"rows": 0})[:-2] + "[\n" + ",\n".join(map(json.dumps, entry["rows"])) + "]}"
        for name, entry in record.items()
    )
    RECORD.write_text("{" + entries + "}\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + page(record, tomllib.loads(READ.read_text(encoding="utf-8"))) + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
