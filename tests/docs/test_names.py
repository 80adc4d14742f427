"""What the pages name is there: modules and functions by their dotted names, files by their paths, links by anchors.

The build checks links between pages; this checks what stands in plain text, which is what a move leaves behind."""

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
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

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.*"), *DOCS.rglob("*.md")])
SOURCES = sorted(
    file for place in ("src", "examples", "benchmarks", "studies") for file in (ROOT / place).rglob("*.py")
)
DOTTED = re.compile(r"(?<![\w./-])klamp(?:\.[A-Za-z_]\w*)+")
PATHS = re.compile(r"(?<![\w./-])(?:src/klamp|tests|scripts|examples|benchmarks|studies|docs)/[\w./-]*\w")
FOREIGN = {"tests/test_grpo_trainer.py", "tests/cli/test_NAME.py", "examples/language/smollm2"}
"""A file of another project, a name to be filled in, and a folder that `prepare.py` writes."""


@cache
def is_there(name: str) -> bool:
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        module = ".".join(parts[:size])
        try:
            found = find_spec(module)
        except ModuleNotFoundError:  # what stands before the last dot is no package
            continue
        if found is not None and found.origin:  # an empty folder that git left behind has none
            return size == len(parts) or _holds(importlib.import_module(module), parts[size:])
    return False


def _holds(thing: object, names: list[str]) -> bool:
    for name in names:
        if not hasattr(thing, name) and name not in getattr(thing, "__dataclass_fields__", {}):
            return False
        thing = getattr(thing, name, None)
    return True


@pytest.mark.parametrize("files", [PAGES, SOURCES], ids=["pages", "sources"])
def test_every_name_and_path_exists(files: list[Path]) -> None:
    missing = dict[str, list[str]]()
    for file in files:
        text = file.read_text(encoding="utf-8").partition("\n### Left before the release\n")[0]
        gone = [name for name in {*DOTTED.findall(text)} if not is_there(name)]
        paths = {*PATHS.findall(text)} - FOREIGN
        gone += [path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.md").exists()]
        if gone:
            missing[str(file)] = gone
    assert missing == {}


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
    kl = {"beta": 0.1, "target_kl": 0.05, "kl_clip_method": "hard", "kl_clip_threshold": 0.01, "max_steps": 2}
    rest = {"model": stored(tiny_llama(), folder / "model"), "output_dir": str(folder / "run")}
    with noted_calls() as calls:
        train_run(TrainConfig.from_flat({**TINY, **rest, **kl}))
        render(read_runs([folder / "run"]))
    return calls


def test_the_walk_of_a_token_is_the_one_that_a_step_takes(trained: list[Call]) -> None:
    assert missing_from(walk("a token"), last_round(walk("a token"), trained)) == []


def test_the_walk_of_beta_is_the_one_that_a_run_takes(trained: list[Call]) -> None:
    assert missing_from(walk("beta"), trained) == []
