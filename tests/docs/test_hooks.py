"""Pages of the repository on their way into the site."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.docs.pages import ROOT, load


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load("hooks")


@pytest.mark.parametrize(
    ("in_the_repository", "on_the_site"),
    [
        ("[a](docs/trl.md#metrics)", "[a](trl.md#metrics)"),
        ("[a](PAPERS.md)", "[a](papers.md)"),
        ("[a](SECURITY.md)", "a"),
        ("[a](https://github.com/klamp-rl/klamp/blob/main/docs/trl.md#metrics)", "[a](trl.md#metrics)"),
        ("[a]: https://github.com/klamp-rl/klamp/blob/main/PAPERS.md", "[a]: papers.md"),
        ("![a](https://raw.githubusercontent.com/klamp-rl/klamp/main/docs/report.png)", "![a](report.png)"),
        ("[a](https://example.org/docs/trl.md)", "[a](https://example.org/docs/trl.md)"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(hooks: ModuleType, in_the_repository: str, on_the_site: str) -> None:
    assert hooks.relink(in_the_repository) == on_the_site


def test_the_site_fetches_no_page_of_its_own_from_the_network(hooks: ModuleType) -> None:
    for name in hooks.PAGES:
        text = hooks.relink((ROOT / name).read_text(encoding="utf-8"))
        assert f"{hooks.HOME}docs/" not in text and hooks.RAW not in text
