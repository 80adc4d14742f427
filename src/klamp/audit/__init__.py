"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from klamp.audit.function import function_subject
from klamp.errors import KlampError, MissingLibrary, UnsupportedVersion, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject


@dataclass(frozen=True, kw_only=True)
class Host:
    """A package whose KL klamp can find, and the versions that this was tried with."""

    package: str
    """The name that pip installs it by."""
    module: str
    """The module whose `subject()` finds the KL; it is imported only when the host is audited."""
    tried: tuple[str, str]
    """The first and the last version that this was tried with."""
    what: str
    """One line on what is audited."""


HOSTS = {
    "trl": Host(
        package="trl",
        module="klamp.audit.trl",
        tried=("1.7.1", "1.16.0"),
        what="GRPOTrainer's loss, with each option that changes its KL",
    ),
    "verl": Host(
        package="verl",
        module="klamp.audit.verl",
        tried=("0.9.1", "0.9.1"),
        what="every kl_loss_type, as a loss and in the reward",
    ),
    "liger": Host(
        package="liger-kernel",
        module="klamp.audit.liger",
        tried=("0.8.5", "0.8.5"),
        what="the chunked GRPO loss",
    ),
    "torchrl": Host(
        package="torchrl",
        module="klamp.audit.torchrl",
        tried=("0.14.1", "0.14.1"),
        what="GRPOLoss, its k3 estimate, the KL in the reward",
    ),
}


def load_subject(name: str) -> Subject:
    """Find what a name stands for: a package of the table, or `module:function`.

    Raises:
        UnknownNameError: neither a host nor of the form `module:function`.
        UnsupportedVersion: the host is not installed, cannot be imported, or has its KL elsewhere in this version.
        ConfigError: the module or function cannot be had.
    """
    if ":" in name:
        return function_subject(name)
    if name not in HOSTS:
        raise unknown_name(
            "host", name, HOSTS, why=f"klamp knows {', '.join(HOSTS)}; anything else goes by module:function"
        )
    host = HOSTS[name]
    installed = installed_version(name, host)
    subject = _load(host, installed)
    caution = version_caution(host, installed)
    return replace(subject, cautions=(*subject.cautions, caution)) if caution else subject


def installed_version(name: str, host: Host) -> str:
    """The version of a host that is installed.

    Raises:
        MissingLibrary: it is not.
    """
    try:
        return version(host.package)
    except PackageNotFoundError:
        raise MissingLibrary(
            f"{host.package} is not installed",
            got=f"klamp audit {name}",
            why="klamp audits the code that is installed where it runs; it holds no copy of anybody's code",
            fix=f"run klamp in the environment that has {host.package}, or pip install {host.package}=={host.tried[1]}",
        ) from None


def version_caution(host: Host, installed: str) -> str:
    """A caution where the installed version is not one of those that were tried; "" otherwise."""
    first, last = host.tried
    if _ordered(first) <= _ordered(installed) <= _ordered(last):
        return ""
    tried = first if first == last else f"{first} to {last}"
    return f"{host.package} {installed} was never tried: the audit is known to read {tried} rightly"


def _load(host: Host, installed: str) -> Subject:
    from klamp.audit.examine import kl_of_one_token

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject = importlib.import_module(host.module).subject()
            kl_of_one_token(subject.terms[0])  # whatever has moved shows here
            return subject
    except KlampError:
        raise
    except Exception as error:  # a host that moved its KL may fail in any way
        first, last = host.tried
        raise UnsupportedVersion(
            f"the KL of {host.package} {installed} cannot be reached",
            got=f"{type(error).__name__}: {error}",
            why=f"this was tried with {first if first == last else f'{first} to {last}'}, complete with dependencies",
            fix=f"pip install {host.package}=={last}, or audit its function by itself: klamp audit module:function",
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _ordered(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparisons: 1.16.0rc1 -> (1, 16, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


__all__ = ["HOSTS", "Host", "load_subject"]
