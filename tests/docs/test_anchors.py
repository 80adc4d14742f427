"""The table of who has which KL to a teacher is the list that every trainer is tested with."""

from pathlib import Path

from tests.hosts.teachers import HAVE, KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "anchors.md"


def fields_of(name: str) -> str:
    return " ".join(f"{key.removeprefix('teacher_')}={value}" for key, value in KINDS[name].items()) or "the defaults"


def table() -> str:
    rows: dict[str, list[str]] = {}
    for name in KINDS:
        trainers = ", ".join(trainer for trainer, have in HAVE.items() if name in have)
        rows.setdefault(trainers, []).append(f"`{fields_of(name)}`")
    return "\n".join(f"| {trainers} | {', '.join(fields)} |" for trainers, fields in rows.items())


def test_the_page_has_the_list() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
