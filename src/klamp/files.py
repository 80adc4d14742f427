"""Reading what users name: paths (`~` is the home folder, a pipe or a device is refused), JSON and YAML."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

LONGEST_NUMBER = 300
"""Digits of the longest whole number that is read: a float holds up to 308, and nothing counts so far."""
LARGEST_YAML = 1_000_000
"""Largest number of values and characters in a YAML text, with every repetition of an alias counted."""


def at_home(name: str | Path) -> Path:
    """The path of a name; `~` is the home folder, if the user has one."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  (Path's raises an error without a home folder)


def followed(path: Path) -> Path:
    """The path behind all links; a circle of links is returned unchanged, and its reader raises the error."""
    return Path(os.path.realpath(path))


def with_end(path: Path) -> Path:
    """The path, if it is a file, a folder or missing; a pipe or a device raises an OSError."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, which may have no end", str(path))
    return path


def json_of(text: str) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: no JSON, half of a surrogate pair in a text, or a whole number larger than every float.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text, parse_int=_whole_number)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def yaml_of(text: str, loader: type | None = None) -> Any:
    """What a YAML text holds; `loader`: one of yaml's, None the safe one.

    Raises:
        ValueError: no YAML, an invalid value in it (a month 13), or aliases that make it larger than `LARGEST_YAML`;
            the message has one line.
    """
    import yaml

    try:
        reader: Any = (loader or yaml.SafeLoader)(text)
        node = reader.get_single_node()
        if _size(node, {}) > LARGEST_YAML:
            raise ValueError("it is too large: its aliases (*NAME) repeat what they name again and again")
        return None if node is None else reader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:  # its constructors' own
        raise ValueError(" ".join(str(error).split())) from error


def _size(node: Any, sizes: dict[int, int]) -> int:
    """How many values and characters a node (or a key with its value) holds; too many if it contains itself."""
    inside = node if isinstance(node, tuple) else getattr(node, "value", ())
    if isinstance(inside, str):
        return 1 + len(inside)
    if id(inside) not in sizes:
        sizes[id(inside)] = LARGEST_YAML + 1
        sizes[id(inside)] = 1 + sum(_size(part, sizes) for part in inside)
    return sizes[id(inside)]


def _whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a whole number of {len(digits)} digits: {digits[:12]}...")
    return int(digits)
