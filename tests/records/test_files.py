"""JSON and JSONL files: what is read, what a killed run may leave, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import DataError
from klamp.records.files import json_lines, json_object


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "file.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "a file is not JSON"),
        (b"\xff\xfe\x00", "a file is not JSON"),
        ("[1]", "a file holds no JSON object"),
        ("null", "a file holds no JSON object"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path: Path, text: str | bytes, what: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(DataError, match=what) as caught:
        json_object(file)
    assert caught.value.got == str(file)


def test_lines_are_read_without_the_empty_ones(tmp_path: Path) -> None:
    assert list(json_lines(written(tmp_path, '{"a": 1}\n\n  \n{"a": 2}\n'))) == [{"a": 1}, {"a": 2}]
    assert list(json_lines(written(tmp_path, ""))) == []


def test_a_last_line_that_a_killed_run_left_half_written_is_ignored(tmp_path: Path) -> None:
    assert list(json_lines(written(tmp_path, '{"a": 1}\n{"a": 2'))) == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1}\n{"a": \n{"a": 3}\n', "line 2 is not JSON"),
        ('{"a": 1}\n\n[2]\n', "line 3 is no JSON object"),
        (b'{"a": "\xff"}\n', "a file is not text"),
    ],
)
def test_another_line_that_cannot_be_read_is_named(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(DataError, match=what):
        list(json_lines(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "rows"),
    [(b'{"a": 1}\n{"a": "\xc3', [{"a": 1}]), ('{"a": "one\u2028line"}\n', [{"a": "one\u2028line"}])],
    ids=["cut within a letter", "a separator of lines within a text"],
)
def test_a_line_ends_where_json_lines_end(tmp_path: Path, text: str | bytes, rows: list[dict[str, object]]) -> None:
    assert list(json_lines(written(tmp_path, text))) == rows


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    lines = json_lines(written(tmp_path, '{"a": 1}\n{"a": \n{"a": 3}\n'))
    assert next(lines) == {"a": 1}
    with pytest.raises(DataError, match="line 2"):
        next(lines)
