"""The recording of `klamp train`: what a program writes to a terminal becomes pictures, and those one small SVG."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from rich.text import Text
from tests.docs.pages import DOCS, ROOT, load

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load("demo")


def plain(picture: tuple[Text, ...]) -> list[str]:
    return [line.plain.rstrip() for line in picture]


def test_a_program_is_recorded_in_a_terminal_and_its_failure_is_one(demo: ModuleType, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size()); print('\\x1b[31mred\\x1b[0m')"
    ((_, lines),) = demo.pictures(demo.record([sys.executable, "-c", code], tmp_path))[-1:]
    assert plain(lines)[:2] == [f"True {demo.COLUMNS} {demo.ROWS}", "red"]
    assert "fill:#" in "".join(demo.pieces(lines[1]))
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(demo.record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path))


def test_the_committed_recording_is_of_a_whole_run_and_small(demo: ModuleType) -> None:
    file = DOCS / "demo.svg"
    assert file.stat().st_size < 300_000
    text = file.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    frames = next(each for each in tree.iter(f"{SVG}g") if each.get("id") == "frames")
    assert 20 <= len(frames) <= demo.FRAMES
    assert "done: 120 steps" in str(tree.findtext(f"{SVG}desc"))
    assert {"script", "image", "foreignObject"}.isdisjoint(each.tag.removeprefix(SVG) for each in tree.iter())
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert f"docs/{file.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
