"""The generated pages are what their tables say now; and they are made of measurements, not of hopes."""

import dataclasses
from types import ModuleType

import pytest
import torch
from tests.docs.pages import DOCS, load
from tests.hosts.teachers import HAVE, KINDS

from klamp.core.estimators import ESTIMATORS


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("generate")


GENERATED = ("which-kl.md", "metrics.md", "alarms.md", "records/index.md")
TRAINERS = ("trl.md", "unsloth.md", "verl.md", "tinker.md")


@pytest.mark.parametrize("file", [*GENERATED, *TRAINERS])
def test_the_committed_page_is_up_to_date(file: str, generate: ModuleType) -> None:
    written = (DOCS / file).read_text(encoding="utf-8")
    assert written == generate.PAGES[file](), f"run: python docs/generate.py (docs/{file} is not what its table says)"


def test_the_table_of_estimators_is_measured(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: 2 * (torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    monkeypatch.setattr(generate, "TERMS", ())
    (shown,) = (line for line in generate.which_kl_page().splitlines() if line.startswith("| `k3` |"))
    assert ": +100 % |" in shown


def test_the_page_of_anchors_has_the_list_of_teachers() -> None:
    rows: dict[str, list[str]] = {}
    for name, values in KINDS.items():
        trainers = ", ".join(trainer for trainer, have in HAVE.items() if name in have)
        fields = " ".join(f"{key.removeprefix('teacher_')}={value}" for key, value in values.items())
        rows.setdefault(trainers, []).append(f"`{fields or 'the defaults'}`")
    table = "\n".join(f"| {trainers} | {', '.join(fields)} |" for trainers, fields in rows.items())
    assert table in (DOCS / "anchors.md").read_text(encoding="utf-8")
