"""The generated pages are what their tables say now; and they are made of measurements, not of hopes."""

from __future__ import annotations

import dataclasses
import re
from types import ModuleType

import pytest
import torch
from tests.docs.pages import DOCS, load

from klamp.core.estimators import ESTIMATORS
from klamp.diagnostics.alarms import ALARMS
from klamp.diagnostics.metrics import METRICS

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("generate")


@pytest.mark.parametrize("file", ["estimators.md", "metrics.md", "alarms.md"])
def test_the_committed_page_is_up_to_date(file: str, generate: ModuleType) -> None:
    written = (DOCS / file).read_text(encoding="utf-8")
    assert written == generate.PAGES[file](), f"run: python docs/generate.py (docs/{file} is not what its table says)"


def test_every_metric_is_on_the_page(generate: ModuleType) -> None:
    page = generate.metrics_page()
    assert all(f"| `{re.sub('[1-8]_of', 'N_of', name)}` |" in page for name in METRICS)
    assert page.count("_of_8` |") == 1


def test_every_alarm_is_on_the_page_with_its_thresholds(generate: ModuleType) -> None:
    page = generate.alarms_page()
    for name, alarm in ALARMS.items():
        assert f"\n## {name}\n" in page and alarm.next_step in page
        assert all(f"- {limit.value:g} {limit.unit} ({limit.source})\n" in page for limit in alarm.limits)


def test_the_numbers_on_the_estimators_page_are_measured(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: 2 * (torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    monkeypatch.setattr(generate, "TERMS", ())
    assert "| `k3` | +100 % |" in generate.estimators_page()


def test_bars_in_cells_do_not_split_them(generate: ModuleType) -> None:
    (_, _, line) = generate._table(("a",), [("|x| KL(p||q)",)])
    assert line == "| \\|x\\| KL(p‖q) |"
