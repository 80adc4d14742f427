"""The page on the house says what the contracts say, and its walks are those that a step takes."""

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.docs.pages import DOCS, ROOT, load
from tests.training.conftest import TINY, stored, tiny_llama

from klamp.cli.report import read_runs
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.report.page import render

SOURCE = ROOT / "src" / "klamp"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
Call = tuple[str, str]
"""A file below src/klamp, and a function in it."""


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return load("house")


def layers() -> list[set[str]]:
    """The layers of the import contract, from the roof down."""
    contracts: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (arrows,) = [each for each in contracts["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return [set(layer.replace("|", ":").replace(" ", "").split(":")) for layer in arrows["layers"]]


def test_the_committed_picture_and_list_are_up_to_date(house: ModuleType) -> None:
    found = house.house()
    assert (DOCS / "architecture.svg").read_text(encoding="utf-8") == house.picture(found), "run: python docs/house.py"
    assert house.with_table(PAGE, house.table(found)) == PAGE, "run: python docs/house.py"


def test_the_picture_shows_the_layers_of_the_contract_in_their_order() -> None:
    texts = ElementTree.parse(DOCS / "architecture.svg").iter("{http://www.w3.org/2000/svg}text")
    rows: dict[str, set[str]] = {}
    for text in texts:
        if text.get("class") == "name":
            rows.setdefault(str(text.get("y")), set()).add(str(text.text))
    assert [rows[y] for y in sorted(rows, key=float)] == layers()


def test_the_list_has_every_folder_of_the_source_and_no_other() -> None:
    rows = re.findall(r"^- `(\w+)`(?: \(laboratory\))?: [^\[\n]*(.*)$", PAGE.partition("<!-- end of rooms")[0], re.M)
    named = {room for room, _ in rows} | {f"{room}/{inner}" for room, x in rows for inner in re.findall("`(.+?)`", x)}
    folders = {str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py")} - {"."}
    modules = {path.stem for path in SOURCE.glob("[a-z]*.py")}
    assert named == folders | modules
    assert set.union(*layers()) == {name for name in named if "/" not in name}


def walk(part: str) -> list[Call]:
    """The calls of a walk on the page, in their order."""
    section = PAGE.partition(f"## The walk of {part}\n")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", section)


@contextmanager
def noted_calls() -> Iterator[list[Call]]:
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            calls.append((str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def missing_from(walk: list[Call], calls: list[Call]) -> list[Call]:
    """The rest of a walk, from the first call on that is not made after the one before it."""
    assert len(walk) > 3
    later = iter(calls)
    return [call for call in walk if call not in later]


def last_round(walk: list[Call], calls: list[Call]) -> list[Call]:
    """The calls from the last time on that the walk's first one is made."""
    return calls[len(calls) - 1 - calls[::-1].index(walk[0]) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    folder = tmp_path_factory.mktemp("walk")
    kl = {"beta": 0.1, "target_kl": 0.05, "kl_clip_method": "hard"}
    kl |= {"kl_clip_threshold": 0.01, "max_steps": 2}
    rest = {"model": stored(tiny_llama(), folder / "model"), "output_dir": str(folder / "run")}
    with noted_calls() as calls:
        train_run(TrainConfig.from_flat({**TINY, **rest, **kl}))
        render(read_runs([folder / "run"]))
    return calls


def test_the_walk_of_a_token_is_the_one_that_a_step_takes(trained: list[Call]) -> None:
    path = walk("a token")
    assert missing_from(path, last_round(path, trained)) == []


def test_the_walk_of_beta_is_the_one_that_a_run_takes(trained: list[Call]) -> None:
    assert missing_from(walk("beta"), trained) == []
