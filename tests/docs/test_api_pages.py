"""The pages of the API name modules that exist, each once; every public name is one that the build would miss."""

from __future__ import annotations

import importlib
import re
import zlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.pages import DOCS, load

NAMED = {
    path.name: re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.M)
    for path in sorted(DOCS.glob("api*.md"))
}
MODULES = [module for modules in NAMED.values() for module in modules]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load("hooks")


@pytest.mark.parametrize("page", sorted(NAMED))
def test_every_module_on_a_page_of_the_api_exists(page: str) -> None:
    assert NAMED[page]
    for module in NAMED[page]:
        importlib.import_module(module)


def test_no_module_is_described_twice() -> None:
    assert not [module for module, times in Counter(MODULES).items() if times > 1]


def test_every_public_module_has_a_place(hooks: ModuleType) -> None:
    assert {module.__name__ for module in hooks.iterate_modules()} <= set(MODULES)


def test_what_a_door_exports_is_public_and_its_rooms_are_not(hooks: ModuleType) -> None:
    public = {name for name, _ in hooks.iterate_public()}
    assert {"klamp.tinker.testing.serve", "klamp.trl.attach", "klamp.verl.overrides", "klamp.core.gradients"} <= public
    assert not [name for name in public if name.startswith(("klamp.tinker.testing.server", "klamp.hosts"))]


def test_a_name_that_the_built_reference_leaves_out_is_found(hooks: ModuleType, tmp_path: Path) -> None:
    names = sorted(name for name, _ in hooks.iterate_public())
    left_out, *kept = names
    inventory = tmp_path / "objects.inv"
    body = "\n".join(f"{name} py:function 1 api.html#$ -" for name in kept)
    inventory.write_bytes(b"# Sphinx\n# Project\n# Version\n# zlib\n" + zlib.compress(body.encode()))
    assert hooks.find_unreferenced(inventory) == [f"{left_out}: not in docs/api.md"]
