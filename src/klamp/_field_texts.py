"""What a dataclass says under each of its fields: the one place where a text about an option stands.

Python keeps no docstring of a field, so it is read from the source. Help on a command line and the fields that klamp
adds to a host's arguments come from here.
"""

import ast
import dataclasses
import functools
import inspect
from itertools import pairwise


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """Field -> the text under it in the source of its class (or of the base that declares it), to a blank line.

    A field that has none there has the text that its metadata points to: of a class, a field, with words filled in.
    """
    texts: dict[str, str] = {}
    for base in (base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)):
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split("\n\n")[0].split())
        for field in dataclasses.fields(base):
            if field.name not in texts and field.metadata.get("text"):
                owner, name, words = field.metadata["text"]
                texts[field.name] = field_texts(owner)[name].format(**words)
    return texts
