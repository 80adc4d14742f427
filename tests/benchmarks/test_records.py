"""Records: what is written; the tables, verdicts and pages that are committed are what the code makes of them today."""

import json
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.__main__ import BENCHMARKS
from benchmarks.records import RESULTS, markdown, newest, save

pytestmark = pytest.mark.slow

RECORDED = {name: record for name in BENCHMARKS if (record := newest(name)) is not None}


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_is_written_as_json_markdown_and_picture(name: str, tmp_path: Path) -> None:
    given = RECORDED[name] | {"date": "2026-11-21"}
    files = save(given, BENCHMARKS[name], tmp_path)
    assert files[0].name == f"{name}_cpu2_202611.json"
    assert json.loads(files[0].read_text()) == given
    if BENCHMARKS[name].plot is not None:
        assert f"]({name}_cpu2_202611.png)" in files[1].read_text()
        assert files[2].read_bytes().startswith(b"\x89PNG") and files[2].stat().st_size > 10_000


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_markdown_is_that_of_its_record(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    expected = markdown(found, BENCHMARKS[found["benchmark"]])
    assert file.with_suffix(".md").read_text(encoding="utf-8") == expected, (
        f"run: python -m benchmarks {found['benchmark']} --render benchmarks/results/{file.name}"
    )


def test_the_readmes_table_is_that_of_the_records() -> None:
    readme = page.README.read_text(encoding="utf-8")
    assert readme == page.with_part(readme, page.readme_part()), "run: python -m benchmarks page"
