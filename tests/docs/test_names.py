"""What the pages name is there: modules and functions by their dotted names, files by their paths, links by anchors.

The build checks links between pages; this checks what stands in plain text, which is what a move leaves behind.
"""

import importlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT

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


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_name_and_path_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8").partition("\n### Left before the release\n")[0]
    assert [name for name in sorted({*DOTTED.findall(text)}) if not is_there(name)] == []
    paths = {*PATHS.findall(text)} - FOREIGN
    assert [path for path in sorted(paths) if not (ROOT / path).exists() and not (ROOT / f"{path}.md").exists()] == []
