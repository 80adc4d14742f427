"""Which versions of each host klamp was tried with; checked where the host is used, never on import of klamp."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from klamp.errors import UnsupportedVersion, missing_library


class Tried(NamedTuple):
    """The range of a host, as pip takes it; what of klamp's needs it; and why no other version will do."""

    needed: str
    by: str
    why: str


_UNSLOTH = ("klamp.trl on Unsloth", "the KL enters in the middle of Unsloth's loss, which changes from week to week")
TRIED: Mapping[str, Tried] = {
    "trl": Tried(
        "trl>=1.10,<2",
        "klamp.trl",
        "the KL enters in the middle of TRL's own loss, which changes from version to version",
    ),
    "unsloth_zoo": Tried("unsloth_zoo>=2026.10.7,<=2026.10.9", *_UNSLOTH),
    "unsloth": Tried("unsloth>=2026.10.7,<=2026.10.9", *_UNSLOTH),
    "verl": Tried(
        "verl>=0.8,<0.10",
        "klamp.verl",
        "the KL enters where verl looks up the name of its own, which changes from version to version",
    ),
    "tinker": Tried(
        "tinker>=0.25,<0.39",
        "klamp.tinker",
        "the SDK changes what its methods return and which keys a datum may have; a KL that is silently left out is "
        "worse than an error",
    ),
}
"""Package of a host -> what was tried."""


def check_version(host: str) -> str:
    """The installed version of a host.

    Raises:
        MissingLibrary: the host is not installed.
        UnsupportedVersion: it is outside the range.
    """
    needed, by, _ = TRIED[host]
    try:
        installed = metadata.version(host)
    except metadata.PackageNotFoundError:
        raise missing_library(host, by=by) from None
    if not Requirement(needed).specifier.contains(installed, prereleases=True):
        raise out_of_range(host, got=f"{host} {installed}")
    return installed


def out_of_range(host: str, *, got: str) -> UnsupportedVersion:
    """The error for a host that is not the one that klamp was tried with."""
    needed, by, why = TRIED[host]
    return UnsupportedVersion(f"{by} needs {needed}", got=got, why=why, fix=f'pip install "{needed}"')


def told_version(host: str) -> str:
    """A host with its version, in words; also where it is not installed."""
    try:
        return f"{host} {metadata.version(host)}"
    except metadata.PackageNotFoundError:
        return f"{host}, not installed here"


@functools.cache
def load_tinker() -> Any:
    """The module `tinker`, or the error that says how to install it.

    Raises:
        MissingLibrary: it is not installed.
        UnsupportedVersion: it is outside the range.
    """
    check_version("tinker")
    return importlib.import_module("tinker")
