"""The recording of `klamp train`: what a program writes to a terminal becomes pictures, and those one small SVG."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text
from tests.docs.pages import DOCS, ROOT, load

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load("demo")


def plain(picture: tuple[Text, ...]) -> list[str]:
    return [line.plain.rstrip() for line in picture]


def test_a_live_display_is_drawn_over_and_not_repeated(demo: ModuleType) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    console.print("before")
    with Live(Text("one\ntwo"), console=console, auto_refresh=False) as live:
        live.update(Text("three\nfour"), refresh=True)
    console.print("after")
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert "one" in written
    screen = demo.Screen()
    for part in (written[i : i + 3] for i in range(0, len(written), 3)):  # sequences arrive in parts
        screen.write(part)
    assert plain(screen.shown()) == ["before", "three", "four", "after", ""]


def test_a_screen_shows_its_last_rows_and_goes_on_in_the_next(demo: ModuleType) -> None:
    screen = demo.Screen()
    screen.write("\r\n".join(f"row {i}" for i in range(demo.ROWS + 5)) + "\r\n" + "x" * (demo.COLUMNS + 2))
    shown = plain(screen.shown())
    assert len(shown) == demo.ROWS
    assert shown[-3:] == [f"row {demo.ROWS + 4}", "x" * demo.COLUMNS, "xx"]


def test_pictures_are_of_whole_screens(demo: ModuleType) -> None:
    written = [(0.0, b"ha"), (0.01, b"lf \xe2\x96"), (0.011, b"\x81"), (1.0, b"\r\nstep 1/2")]
    found = demo.pictures(written)
    assert [(seconds, plain(lines)) for seconds, lines in found] == [(0.011, ["half ▁"]), (1.0, ["half ▁", "step 1/2"])]
    assert [seconds for seconds, _ in demo.from_the_first_step(found)] == [1.0]


def test_pictures_are_chosen_at_even_times(demo: ModuleType) -> None:
    found = [(float(i), (Text(str(i // 4)),)) for i in range(9)]
    assert [plain(lines) for lines in demo.chosen(found, 5)] == [["0"], ["1"], ["2"]]


def test_a_program_is_recorded_in_a_terminal_and_its_failure_is_one(demo: ModuleType, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size()); print('\\x1b[31mred\\x1b[0m')"
    ((_, lines),) = demo.pictures(demo.record([sys.executable, "-c", code], tmp_path))[-1:]
    assert plain(lines)[:2] == [f"True {demo.COLUMNS} {demo.ROWS}", "red"]
    assert "fill:#" in "".join(demo.pieces(lines[1]))
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(demo.record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path))


def test_a_line_that_many_frames_show_is_drawn_once(demo: ModuleType) -> None:
    frames = [(Text("always"), Text("<one>  word")), (Text("always"), Text("two"))]
    tree = ElementTree.fromstring(demo.draw(frames, title="a & b", description="<c>"))
    texts = [str(each.text) for each in tree.iter(f"{SVG}text")]
    assert sorted(texts) == sorted(["a & b", "always", "<one>", "word", "two"])
    assert len(list(tree.iter(f"{SVG}use"))) == 4


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
