"""What a dataclass says under each of its fields: the one place where a text about an option stands.

Python keeps no docstring of a field, so it is read from the source. Help on a command line and the fields that klamp
adds to a host's arguments come from here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys


def field_texts(cls: type) -> dict[str, str]:
    """Field -> the text under it in the source of its class (or of the base that declares it), to a blank line.

    A field that has none there has the text that its metadata points to: of a class, a field, with words filled in.
    """
    texts: dict[str, str] = {}
    for base in (base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)):
        texts |= _classes(base.__module__).get(base.__name__, {})
        for field in dataclasses.fields(base):
            if field.name not in texts and field.metadata.get("text"):
                owner, name, words = field.metadata["text"]
                texts[field.name] = field_texts(owner)[name].format(**words)
    return texts


@functools.cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    """Class of a module -> its fields -> their texts."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _texts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split("\n\n")[0].split())
    return texts
