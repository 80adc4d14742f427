"""Tests mirror the source, file for file: whoever changes a module finds its tests without searching."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src" / "klamp"
STANDIN = TESTS.parent / "standin" / "src"

ENGINES = {"hosts/unsloth": "engines/unsloth", "hosts/verl": "engines/verl", "verl": "engines/verl"}
"""Folder of modules that need a package of an environment of its own -> where their tests may be too."""


def modules() -> list[str]:
    """Every module that holds code, by its path without `.py`; no `__init__`, no door that only passes on names."""
    return sorted(
        str(path.relative_to(source).with_suffix(""))
        for source in (SOURCE, STANDIN)
        for path in source.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py", "_version.py") and not only_exports(path)
    )


def only_exports(path: Path) -> bool:
    """Whether a module does nothing but pass on what others define."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return bool(imports) and all(_says_nothing(node) for node in others)


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, or the assignment of `__all__`."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] == ["__all__"]
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def places(module: str) -> list[Path]:
    """Where the test file of a module may be."""
    folder, _, name = module.rpartition("/")
    file = f"test_{name.lstrip('_')}.py"
    found = [TESTS / folder / file]
    if folder in ENGINES:
        found.append(TESTS / ENGINES[folder] / file)
    if folder == "audit" and (TESTS / "engines" / name).is_dir():
        found.append(TESTS / "engines" / name / "test_audit.py")
    return found


def has_tests(module: str) -> bool:
    return any(place.exists() for place in places(module))


@pytest.mark.parametrize("module", modules())
def test_every_module_has_a_test_file_of_its_name(module: str) -> None:
    where = " or ".join(str(place.relative_to(TESTS.parent)) for place in places(module))
    assert has_tests(module), f"{module}.py has no tests: write {where}"


def test_a_door_is_told_from_a_room(tmp_path: Path) -> None:
    door, room = tmp_path / "door.py", tmp_path / "room.py"
    door.write_text('"""A door."""\n\nfrom a import b\n\n__all__ = ["b"]\n', encoding="utf-8")
    room.write_text('"""A room."""\n\nfrom a import b\n\nb()\n', encoding="utf-8")
    assert only_exports(door)
    assert not only_exports(room)


def test_tests_of_engines_count() -> None:
    assert TESTS / "engines" / "unsloth" / "test_loss.py" in places("hosts/unsloth/loss")
    assert TESTS / "core" / "test_linear_kl.py" in places("core/_linear_kl")
    assert places("ablation/plan") == [TESTS / "ablation" / "test_plan.py"]
