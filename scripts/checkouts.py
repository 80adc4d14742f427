"""Runs definitions of packages that are not installed, from checkouts of their repositories.

A file is imported with the modules stubbed that the wanted definition does not use; where that would take the whole
package, the definition is cut from its file and executed unchanged.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Unused(type):
    """Of classes that stand for whatever a file imports and the loss does not use."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def stub(*names: str, **attributes: Any) -> None:
    """Let modules be imported that are not there; of what is not given, every name is an empty class."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes, __getattr__=functools.partial(_unused, name))
        sys.modules[name] = module


def _unused(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return sys.modules.get(f"{module}.{name}") or Unused(name, (), {})


def package(name: str, folder: Path, *inside: str) -> None:
    """Let the modules of a folder be imported one by one, without what the package itself imports.

    Args:
        name: of the package.
        folder: its own.
        inside: packages in it that go the same way, with dots.
    """
    for each in ("", *inside):
        module = types.ModuleType(f"{name}.{each}".rstrip("."))
        module.__path__ = [str(folder.joinpath(*each.split(".")))]
        sys.modules[module.__name__] = module


def cut(file: Path, *names: str, **scope: Any) -> Any:
    """Definitions of a file, `function`, `Class`, `Class.method` or `NAME`, executed unchanged; only `scope` is known.

    Raises:
        LookupError: the file has no such definition.
    """
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        named = node.targets[0] if isinstance(node, ast.Assign) else node
        found[getattr(named, "name", getattr(named, "id", ""))] = node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            found[f"{getattr(node, 'name', '')}.{getattr(inner, 'name', '')}"] = inner
    if missing := [name for name in names if name not in found]:
        raise LookupError(f"{file.name} has no {', '.join(missing)}")
    annotations = ast.parse("from __future__ import annotations").body  # they name types that are not there
    tree = ast.Module(body=annotations + [found[name] for name in names], type_ignores=[])
    scope = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, **scope}
    exec(compile(tree, str(file), "exec"), scope)
    return SimpleNamespace(**{name.rpartition(".")[2]: scope[name.rpartition(".")[2]] for name in names})


def commit_of(folder: Path) -> str:
    """The commit of a checkout, the version of an unpacked wheel, or nothing."""
    if (folder / ".git").exists():
        asked = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return next((each.stem.rpartition("-")[2] for each in folder.glob("*.dist-info")), "")


class Options(SimpleNamespace):
    """What code reads of an object: what is not given is None, an option that is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def nothing(*_: Any, **__: Any) -> None:
    """In the place of what only logs."""


def undecorated(function: Any = None, **_: Any) -> Any:
    """In the place of a decorator, with options or without."""
    return function or undecorated
