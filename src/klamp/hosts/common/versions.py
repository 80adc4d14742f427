"""What each host needs, and which versions klamp was tried with; checked on use, never on import of klamp."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from klamp.errors import KLWarning, UnsupportedVersion, missing_library


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """One package that klamp's KL is used in."""

    needed: str  # what pip may install: a floor, which is tested; a cap only where a break is known
    upto: str  # the newest version, or series, that klamp's tests passed with: pinned, or in docs/records/index.md
    door: str  # the module of klamp's that needs it
    extra: str  # the extra of klamp's that installs it; empty: none does
    asked: str  # where its version is asked for: a cell of the table in docs/records/index.md
    why: str  # what may break with another version


_SENT = "a trainer's weights are sent into vLLM, and vLLM packs and renames them differently from version to version"
_PARTS = "klamp calls a model's body and head separately, and transformers changes their names and calls now and then"
_INSIDE = "the KL enters inside the host's own loss, which changes from version to version"
_SDK = "the SDK changes what its methods return and which keys a datum may have; a lost KL is worse than an error"
HOSTS: Mapping[str, HostRecord] = {
    "trl": HostRecord(needed="trl>=1.10", upto="1.16", door="klamp.trl", extra="trl",
                      asked="`klamp.trl`, `--backend trl`", why=_INSIDE),
    "verl": HostRecord(needed="verl>=0.9.1", upto="0.9", door="klamp.verl", extra="verl",
                       asked="`klamp.verl`, `--backend verl`", why=_INSIDE),
    "tinker": HostRecord(needed="tinker>=0.25", upto="0.38", door="klamp.tinker", extra="tinker",
                         asked="`klamp.tinker`", why=_SDK),
    "unsloth": HostRecord(needed="unsloth>=2026.10.7", upto="2026.10.9", door="klamp.unsloth", extra="unsloth",
                          asked="`klamp.trl` on Unsloth", why=_INSIDE),
    "unsloth_zoo": HostRecord(needed="unsloth_zoo>=2026.10.7", upto="2026.10.9", door="klamp.unsloth",
                              extra="unsloth", asked="the same", why=_INSIDE),
    "transformers": HostRecord(needed="transformers>=4.56.2", upto="5.24", door="klamp", extra="train",
                               asked="every run of `klamp train`, and `klamp.trl`", why=_PARTS),
    "vllm": HostRecord(needed="vllm", upto="0.32", door="klamp", extra="", why=_SENT,
                       asked="a run in TRL or verl that samples with vLLM; TRL and verl decide which versions they "
                       "support"),
}  # fmt: skip
"""Package -> its record."""


def check_version(host: str) -> str:
    """The installed version of a host; refuses one that is missing or too old, cautions once of a newer one."""
    if (installed := installed_version(host)) is None:
        raise missing_library(host, by=HOSTS[host].door)
    if not Requirement(HOSTS[host].needed).specifier.contains(installed, prereleases=True):
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


def hardware(*, cpu: bool) -> str:
    """What this process computes on, in words; `cpu`: it stays on the CPU even if there are GPUs."""
    import torch

    gpus = 0 if cpu else torch.cuda.device_count()
    if gpus:
        return f"{gpus} x {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' if threads > 1 else ''})"


@functools.cache
def _caution(host: str, installed: str) -> None:
    record = HOSTS[host]
    tried = Version(record.upto).release
    if Version(installed).release[: len(tried)] > tried:
        warnings.warn(
            f"{host} {installed} is newer than what {record.door} was tried with, up to {record.upto}: {record.why}. "
            f'See what is in force (`effective`, `klamp audit`) before a long run, or pip install "{host}=='
            f'{record.upto}.*". What breaks, or not: https://github.com/klamp-rl/klamp/issues',
            KLWarning,
            stacklevel=3,
        )


def out_of_range(host: str, *, got: str) -> UnsupportedVersion:
    """The error for a host that is not the one that klamp was tried with."""
    record = HOSTS[host]
    return UnsupportedVersion(
        f"{record.door} needs {record.needed}, and was tried up to {record.upto}",
        got=got,
        why=record.why,
        fix=f'pip install "{host}=={record.upto}.*"',
    )


def host_version(host: str, trainer: object = None) -> str:
    """A host with its version, and the class of a trainer, as `effective` shows it; also if it is not installed."""
    installed = installed_version(host)
    name = f"{host}, not installed here" if installed is None else f"{host} {installed}"
    return name if trainer is None else f"{name}, {type(trainer).__name__}"


@functools.cache
def load_tinker() -> Any:
    """The module `tinker`, or the error that says how to install it."""
    check_version("tinker")
    return importlib.import_module("tinker")
