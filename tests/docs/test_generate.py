"""The generated pages are what their tables say now; and they are made of measurements, not of hopes."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
from tests.docs.pages import DOCS, load

from klamp.core.estimators import ESTIMATORS
from klamp.verify.convergence import LOSSES, REACHED, ends, terms

ENDS = (DOCS / "records" / "where-it-ends.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("generate")


@pytest.mark.parametrize(
    "file", ["estimators.md", "metrics.md", "alarms.md", "records/teacher-alarms.md", "records/resumes.md"]
)
def test_the_committed_page_is_up_to_date(file: str, generate: ModuleType) -> None:
    written = (DOCS / file).read_text(encoding="utf-8")
    assert written == generate.PAGES[file](), f"run: python docs/generate.py (docs/{file} is not what its table says)"


def test_the_numbers_on_the_estimators_page_are_measured(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: 2 * (torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    monkeypatch.setattr(generate, "TERMS", ())
    assert "| `k3` | +100 % |" in generate.estimators_page()


@pytest.mark.parametrize("term", ["reward, k1", "loss, k3, token"])
def test_a_distance_is_found_again(term: str) -> None:
    worst = max(end.distance for end in ends(term, "fixed length"))
    assert f"| {term} | {'exact' if worst < REACHED else f'{worst:.2g}'} |" in ENDS


def test_every_term_and_loss_has_its_cell() -> None:
    distances = ENDS.partition("Distance to the optimum")[2].partition("<!--")[0]
    assert all(f"| {term} |" in distances for term in terms()) and all(f"| {loss} |" in distances for loss in LOSSES)
