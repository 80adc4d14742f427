"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with.

A trainer goes by its name, any other KL function that can be imported by `module:function`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from klamp.errors import ConfigError, KlampError, UnsupportedVersion, missing_library, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject
    from klamp.core.types import Direction


class Host(NamedTuple):
    """A package whose KL klamp can find: by the function of its name in `klamp.audit.trainers`.

    Attributes:
        tried: the versions that this was tried with, as pip takes them.
        what: one line on what is audited.
    """

    tried: str
    what: str


HOSTS = {
    "trl": Host(
        "trl>=1.7.1,<=1.16.0",
        "GRPOTrainer's loss with each option that changes its KL, and the trainers for distillation",
    ),
    "verl": Host("verl==0.9.1", "every kl_loss_type, as a loss and in the reward"),
    "liger": Host("liger-kernel==0.8.5", "the chunked GRPO loss and JSD"),
    "torchrl": Host("torchrl==0.14.1", "GRPOLoss, its k3 estimate, the KL in the reward, DistillationLoss"),
}


def load_subject(name: str, *, means: Direction = "reverse") -> Subject:
    """Find what a name stands for: a package of the table, or `module:function`.

    Raises:
        UnknownNameError: neither a host nor of the form `module:function`.
        UnsupportedVersion: the host is not installed, cannot be imported, or has its KL elsewhere in this version.
        ConfigError: the module or function cannot be had.
    """
    if ":" in name:
        return function_subject(name, means=means)
    if name not in HOSTS:
        why = f"klamp knows {', '.join(HOSTS)}; anything else goes by module:function"
        raise unknown_name("host", name, HOSTS, why=why)
    host = HOSTS[name]
    requirement = Requirement(host.tried)
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        instead = f'or, as it was tried: pip install "{host.tried}"'
        raise missing_library(requirement.name, by=f"klamp audit {name}", instead=instead) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject: Subject = getattr(importlib.import_module("klamp.audit.trainers"), name)()
            for loss in subject.losses[:1]:  # whatever has moved shows here
                loss.verdict()
    except KlampError:
        raise
    except Exception as error:  # a host that moved its KL may fail in any way
        raise UnsupportedVersion(
            f"the KL of {requirement.name} {installed} cannot be reached",
            got=f"{type(error).__name__}: {error}",
            why=f"this was tried with {host.tried}, complete with dependencies",
            fix=f'pip install "{host.tried}", or audit its function by itself: klamp audit module:function',
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    if requirement.specifier.contains(installed, prereleases=True):
        return subject
    caution = f"{requirement.name} {installed} was never tried: the audit is known to read {host.tried} rightly"
    return replace(subject, cautions=(*subject.cautions, caution))


def function_subject(path: str, *, means: Direction = "reverse") -> Subject:
    """Prepare a function for an audit: a KL or a whole loss, or, with four arguments, a loss of distillation."""
    import torch

    from klamp.audit.examine import AuditedLoss, Subject, called

    function = load_function(path)
    loss = AuditedLoss(name=path, compute=function, takes="function", means=means)
    if _takes(function, 4) and not _takes(function, 2):
        loss = replace(loss, compute=lambda batch: function(*batch.aligned), takes="sequences")
    else:
        policy = torch.full((2, 3), -1.0, dtype=torch.float64)
        called(function, policy, policy - 0.5)  # a function of another form is refused here
    return Subject(title=path, losses=(loss,))


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def load_function(path: str) -> Callable[..., Any]:
    """Import the function that `module:function` or `module:Class.method` names; the working directory is searched too.

    Raises:
        UnknownNameError: the module has no such function; names the nearest.
        ConfigError: it cannot be imported, or is not callable.
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigError(
            "this does not name a function", got=repr(path), why="it needs a module and a name", fix="module:function"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        if isinstance(error, AttributeError) and module in sys.modules:
            public = [x for x, value in vars(sys.modules[module]).items() if callable(value) and x[0] != "_"]
            raise unknown_name("function", attribute, public, why=str(error)) from None
        raise ConfigError(
            f"{module} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            why=f"klamp audit {path} looks in the working directory and in the installed packages",
            fix="run it where `python -c 'import ...'` of that module works",
        ) from error
    if not callable(function):
        from klamp.audit.examine import CONTRACT

        why = "an audit calls it"
        raise ConfigError(f"{path} is no function", got=type(function).__name__, why=why, fix=f"name one: {CONTRACT}")
    return function


__all__ = ["HOSTS", "Host", "load_function", "load_subject"]
