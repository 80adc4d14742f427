"""The versions of the Tinker SDK that klamp works with; checked when the SDK is used, not on import."""

from __future__ import annotations

import functools
import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from klamp.errors import UnsupportedVersion, missing_library

FIRST, BEFORE = (0, 25), (0, 39)
"""The SDK's versions from the first (included) to the second (not included)."""
RANGE = "tinker>=0.25,<0.39"


def check_version(installed: str) -> None:
    """Refuse a version of the SDK that klamp was not tested with.

    Raises:
        UnsupportedVersion: outside the range.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not FIRST <= numbers < BEFORE:
        raise UnsupportedVersion(
            "this version of the Tinker SDK is outside the range that klamp was tested with",
            got=f"tinker {installed}",
            why="the SDK changes what its methods return and which keys a datum may have; a KL that is silently left "
            "out is worse than an error",
            fix=f"pip install '{RANGE}'",
        )


@functools.cache
def load_tinker() -> Any:
    """The module `tinker`, or the error that says how to install it.

    Raises:
        MissingLibrary: it is not installed.
        UnsupportedVersion: it is outside the range.
    """
    try:
        check_version(version("tinker"))
    except PackageNotFoundError:
        raise missing_library("tinker", by="klamp.tinker") from None
    return importlib.import_module("tinker")
