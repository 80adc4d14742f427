"""Audits of other packages: the trainers that `klamp audit` has by name, with the versions that were tried."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from klamp.errors import KlampError, UnsupportedVersion, missing_library, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject
    from klamp.core.types import Direction

HOSTS = {
    "trl": "trl>=1.7.1,<=1.16.0",
    "verl": "verl==0.9.1",
    "liger": "liger-kernel==0.8.5",
    "torchrl": "torchrl==0.14.1",
}
"""Function in `klamp.audit.trainers` -> the package and the versions that were tried, as pip takes them."""


def load_subject(name: str, *, means: Direction = "reverse") -> Subject:
    """Find the subject of a name: a package of the table, or `module:function`.

    Raises:
        UnknownNameError: neither a host nor of the form `module:function`.
        UnsupportedVersion: the host is not installed, cannot be imported, or has its KL elsewhere in this version.
        ConfigError: the module or function cannot be had.
    """
    if ":" in name:
        return import_module("klamp.audit.examine").function_subject(name, means=means)
    if name not in HOSTS:
        raise unknown_name("host", name, HOSTS, why=f"{', '.join(HOSTS)}; anything else goes by module:function")
    tried, requirement = HOSTS[name], Requirement(HOSTS[name])
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        instead = f'or, as it was tried: pip install "{tried}"'
        raise missing_library(requirement.name, by=f"klamp audit {name}", instead=instead) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject: Subject = getattr(import_module("klamp.audit.trainers"), name)()
            subject.losses[0].verdict()  # a changed interface raises an error here
    except KlampError:
        raise
    except Exception as error:  # a host that moved its KL may fail in any way
        what, got = f"the KL of {requirement.name} {installed} cannot be reached", f"{type(error).__name__}: {error}"
        why = f"this was tried with {tried}, complete with dependencies"
        fix = f'pip install "{tried}", or audit one function: klamp audit module:function'
        raise UnsupportedVersion(what, got=got, why=why, fix=fix) from error
    finally:
        logging.disable(logging.NOTSET)
    if requirement.specifier.contains(installed, prereleases=True):
        return subject
    caution = f"{requirement.name} {installed} was never tried: the audit is known to read {tried} rightly"
    return replace(subject, cautions=(*subject.cautions, caution))


__all__ = ["HOSTS", "load_subject"]
