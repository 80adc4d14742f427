"""klamp: the KL layer for GRPO-style training of language models.

`import klamp` loads nothing heavy: a name brings its module, and with it torch, when it is first used (PEP 562).
`__init__.pyi` is the one list of what klamp exports; type checkers, editors and this module read it.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: f"{node.module}" for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
"""Name -> the module that it is imported from; `klamp` itself for a submodule."""

__all__ = [name for name in sorted(_HOMES) if _HOMES[name] != "klamp"]  # pyright: ignore[reportUnsupportedDunderAll]


_OF_TRL = ("GRPOConfig", "GRPOTrainer", "DistillationConfig", "DistillationTrainer")


def __getattr__(name: str) -> Any:
    if name in _OF_TRL:  # an AttributeError would lose its text in `from klamp import NAME`
        raise ImportError(f"klamp's {name} is in klamp.trl: from klamp.trl import {name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'klamp' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    if _HOMES[name] == "klamp":
        return importlib.import_module(f"klamp.{name}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
