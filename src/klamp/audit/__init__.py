"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with."""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from klamp.audit.function import function_subject
from klamp.errors import KlampError, MissingLibrary, UnsupportedVersion, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject


class Host(NamedTuple):
    """A package whose KL klamp can find: `subject()` of the module of its name here.

    Attributes:
        tried: the versions that this was tried with, as pip takes them.
        what: one line on what is audited.
    """

    tried: str
    what: str

    @property
    def package(self) -> str:
        """The name that pip installs it by."""
        return Requirement(self.tried).name


HOSTS = {
    "trl": Host("trl>=1.7.1,<=1.16.0", "GRPOTrainer's loss, with each option that changes its KL"),
    "verl": Host("verl==0.9.1", "every kl_loss_type, as a loss and in the reward"),
    "liger": Host("liger-kernel==0.8.5", "the chunked GRPO loss"),
    "torchrl": Host("torchrl==0.14.1", "GRPOLoss, its k3 estimate, the KL in the reward"),
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
    try:
        installed = version(host.package)
    except PackageNotFoundError:
        raise MissingLibrary(
            f"{host.package} is not installed",
            got=f"klamp audit {name}",
            why="klamp audits the code that is installed where it runs; it holds no copy of anybody's code",
            fix=f'run klamp in the environment that has {host.package}, or pip install "{host.tried}"',
        ) from None
    subject = _load(name, host, installed)
    if Requirement(host.tried).specifier.contains(installed, prereleases=True):
        return subject
    caution = f"{host.package} {installed} was never tried: the audit is known to read {host.tried} rightly"
    return replace(subject, cautions=(*subject.cautions, caution))


def _load(name: str, host: Host, installed: str) -> Subject:
    from klamp.audit.examine import kl_of_one_token

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject: Subject = importlib.import_module(f"klamp.audit.{name}").subject()
            kl_of_one_token(subject.terms[0])  # whatever has moved shows here
            return subject
    except KlampError:
        raise
    except Exception as error:  # a host that moved its KL may fail in any way
        raise UnsupportedVersion(
            f"the KL of {host.package} {installed} cannot be reached",
            got=f"{type(error).__name__}: {error}",
            why=f"this was tried with {host.tried}, complete with dependencies",
            fix=f'pip install "{host.tried}", or audit its function by itself: klamp audit module:function',
        ) from error
    finally:
        logging.disable(logging.NOTSET)


__all__ = ["HOSTS", "Host", "load_subject"]
