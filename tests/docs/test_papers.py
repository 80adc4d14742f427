"""The paper trail: what has a name has a source."""

from __future__ import annotations

import pytest
from tests.docs.pages import DOCS, ROOT

from klamp.config import PRESETS
from klamp.core.estimators import ESTIMATORS

PAPERS, SOURCES = (file.read_text(encoding="utf-8") for file in (ROOT / "PAPERS.md", DOCS / "sources.md"))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_has_a_source(name: str) -> None:
    (rows,) = [part for part in PAPERS.split("\n## ") if part.startswith("Values\n")]
    assert f"`{name}`" in rows or f'estimator="{name}"' in rows


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_preset_has_a_source(name: str) -> None:
    """A formula that is passed around stands on the page of those documents, a recipe among the papers."""
    printed = "docs/sources.md" in PRESETS[name].paper
    assert f"| `{name}` |" in (SOURCES if printed else PAPERS)
