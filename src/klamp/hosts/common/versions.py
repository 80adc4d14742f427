"""Which versions of each host klamp was tried with; checked where the host is used, never on import of klamp."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from klamp.errors import KLWarning, UnsupportedVersion, missing_library


class Tried(NamedTuple):
    """What of a host pip may install, and up to where it was tried; what of klamp's needs it; and what may break."""

    needed: str
    """A floor, which is tested; a cap only where a break is known."""
    upto: str
    """The newest version, or series of versions, that klamp's tests have run against."""
    by: str
    why: str


_SENT = "a trainer's weights are sent into vLLM, and what it packs or renames of them changes from version to version"
_PARTS = "klamp calls the body and the head of a model apart, which transformers names and calls otherwise now and then"
_INSIDE = "the KL enters inside the host's own loss, which changes from version to version"
_SDK = "the SDK changes what its methods return and which keys a datum may have; a lost KL is worse than an error"
TRIED: Mapping[str, Tried] = {
    "trl": Tried("trl>=1.10", "1.16", "klamp.trl", _INSIDE),
    "unsloth_zoo": Tried("unsloth_zoo>=2026.10.7", "2026.10.9", "klamp.trl on Unsloth", _INSIDE),
    "unsloth": Tried("unsloth>=2026.10.7", "2026.10.9", "klamp.trl on Unsloth", _INSIDE),
    "verl": Tried("verl>=0.9.1", "0.9", "klamp.verl", _INSIDE),
    "tinker": Tried("tinker>=0.25", "0.38", "klamp.tinker", _SDK),
    "transformers": Tried("transformers>=4.56.2", "5.23", "klamp", _PARTS),
    "vllm": Tried("vllm", "0.32", "klamp", _SENT),  # which of them: TRL's and verl's to say
}
"""Package of a host -> what was tried."""


def check_version(host: str) -> str:
    """The installed version of a host; refuses one that is missing or too old, cautions once of a newer one."""
    needed, _, by, _ = TRIED[host]
    if (installed := installed_version(host)) is None:
        raise missing_library(host, by=by)
    if not Requirement(needed).specifier.contains(installed, prereleases=True):
        raise out_of_range(host, got=f"{host} {installed}")
    _caution(host, installed)
    return installed


def caution_beside(*hosts: str) -> None:
    """Caution likewise of what a host brings along."""
    for host in hosts:
        if installed := installed_version(host):
            _caution(host, installed)


def installed_version(host: str) -> str | None:
    """The installed version of a package; None: it is missing."""
    for name in (host, f"{host}-cpu"):  # vLLM's build for CPUs is a package of its own
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


@functools.cache
def _caution(host: str, installed: str) -> None:
    _, upto, by, why = TRIED[host]
    tried = Version(upto).release
    if Version(installed).release[: len(tried)] > tried:
        warnings.warn(
            f"{host} {installed} is newer than what {by} was tried with, up to {upto}: {why}. See what is in force "
            f'(`effective`, `klamp audit`) before a long run, or pip install "{host}=={upto}.*". What breaks, or not: '
            "https://github.com/klamp-rl/klamp/issues",
            KLWarning,
            stacklevel=3,
        )


def out_of_range(host: str, *, got: str) -> UnsupportedVersion:
    """The error for a host that is not the one that klamp was tried with."""
    needed, upto, by, why = TRIED[host]
    return UnsupportedVersion(
        f"{by} needs {needed}, and was tried up to {upto}", got=got, why=why, fix=f'pip install "{host}=={upto}.*"'
    )


def told_version(host: str) -> str:
    """A host with its version, in words; also where it is not installed."""
    installed = installed_version(host)
    return f"{host}, not installed here" if installed is None else f"{host} {installed}"


@functools.cache
def load_tinker() -> Any:
    """The module `tinker`, or the error that says how to install it."""
    check_version("tinker")
    return importlib.import_module("tinker")
