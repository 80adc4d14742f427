"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with.

A trainer goes by its name, any other KL function that can be imported by `module:function`.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from klamp.errors import KlampError, UnsupportedVersion, missing_library, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject
    from klamp.core.types import Direction


class Host(NamedTuple):
    """A package whose KL klamp can find: by the function of its name in `klamp.audit.trainers`."""

    tried: str  # the versions that this was tried with, as pip takes them
    what: str  # one line on what is audited


HOSTS = {
    "trl": Host(
        "trl>=1.7.1,<=1.16.0",
        "GRPOTrainer's loss with each option that changes its KL, and the trainers for distillation",
    ),
    "verl": Host("verl==0.9.1", "every kl_loss_type, as a loss and in the reward"),
    "liger": Host("liger-kernel==0.8.5", "the chunked GRPO loss and JSD"),
    "torchrl": Host("torchrl==0.14.1", "GRPOLoss, its k3 estimate, DistillationLoss"),
}


def load_subject(name: str, *, means: Direction = "reverse") -> Subject:
    """Find what a name stands for: a package of the table, or `module:function`.

    Raises:
        UnknownNameError: neither a host nor of the form `module:function`.
        UnsupportedVersion: the host is not installed, cannot be imported, or has its KL elsewhere in this version.
        ConfigError: the module or function cannot be had.
    """
    if ":" in name:
        return import_module("klamp.audit.examine").function_subject(name, means=means)
    if name not in HOSTS:
        why = f"klamp knows {', '.join(HOSTS)}; anything else goes by module:function"
        raise unknown_name("host", name, HOSTS, why=why)
    tried = HOSTS[name].tried
    requirement = Requirement(tried)
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        instead = f'or, as it was tried: pip install "{tried}"'
        raise missing_library(requirement.name, by=f"klamp audit {name}", instead=instead) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject: Subject = getattr(import_module("klamp.audit.trainers"), name)()
            subject.losses[0].verdict()  # whatever has moved shows here
    except KlampError:
        raise
    except Exception as error:  # a host that moved its KL may fail in any way
        what, got = f"the KL of {requirement.name} {installed} cannot be reached", f"{type(error).__name__}: {error}"
        why = f"this was tried with {tried}, complete with dependencies"
        fix = f'pip install "{tried}", or audit its function by itself: klamp audit module:function'
        raise UnsupportedVersion(what, got=got, why=why, fix=fix) from error
    finally:
        logging.disable(logging.NOTSET)
    if requirement.specifier.contains(installed, prereleases=True):
        return subject
    caution = f"{requirement.name} {installed} was never tried: the audit is known to read {tried} rightly"
    return replace(subject, cautions=(*subject.cautions, caution))


__all__ = ["HOSTS", "Host", "load_subject"]
