"""Functions that users name: `package.module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from klamp.errors import ConfigError, unknown_name
from klamp.files import at_home, with_end


def is_function(name: str) -> bool:
    """Whether a name has the form of a function's, `module:function`."""
    module, _, function = name.rpartition(":")
    return bool(module) and function.isidentifier()


def import_function(name: str, *, what: str) -> Callable[..., Any]:
    """Import a function by its name.

    Args:
        name: `module:function`; a module that ends in `.py` is a file.
        what: what the function is for, as errors name it: "reward function".

    Raises:
        ConfigError: the module cannot be imported.
        UnknownNameError: the module has no such function.
    """
    module, _, function = name.rpartition(":")
    # a console script does not have the working directory on its path; at the end of the path it hides nothing
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        if module.endswith(".py"):
            loaded: Any = SimpleNamespace(**runpy.run_path(str(with_end(at_home(module)))))
        else:
            loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module of a {what} cannot be imported",
            got=module,
            why=f"{type(error).__name__}: {error}",
            fix="run from the folder that holds the module, put it on PYTHONPATH, or write path/to/file.py:function",
        ) from error
    target = getattr(loaded, function, None)
    if not callable(target):
        names = [n for n, v in vars(loaded).items() if callable(v) and not n.startswith("_")]
        raise unknown_name(what, function, names, why=f"{module} has: {', '.join(names) or 'no functions'}")
    return target
