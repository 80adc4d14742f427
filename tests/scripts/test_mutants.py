"""The mutation run: every module has tests, and equivalent mutants are of the code as it is."""

from pathlib import Path

import pytest
from scripts import mutants
from scripts.mutants import equivalent, modules, page_of, recorded, source, stages

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("module", modules())
def test_every_module_has_tests_to_run(module: str) -> None:
    assert stages(module)
    assert all(Path(file).is_file() for files in stages(module) for file in files)


@pytest.mark.parametrize("key", equivalent(), ids=str)
def test_an_equivalent_mutant_is_of_a_line_that_is_there_and_says_why(key: mutants.Key) -> None:
    module, _, line, becomes = key
    assert line in [line.strip() for line in source(module).splitlines()]
    assert line != becomes
    assert len(equivalent()[key].split()) > 4


def test_the_page_shows_the_record() -> None:
    page = mutants.PAGE.read_text(encoding="utf-8")
    assert page_of(page, recorded()) == page, "what is on the page comes from"
