"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with.

A trainer goes by its name, any other KL function that can be imported by `module:function`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from klamp.errors import ConfigError, KlampError, MissingLibrary, UnsupportedVersion, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject
    from klamp.core.types import Direction


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
    try:
        with warnings.catch_warnings(action="ignore"):  # theirs, on import and on deprecated options; not about the KL
            logging.disable(logging.WARNING)
            subject: Subject = importlib.import_module(f"klamp.audit.{name}").subject()
            for loss in subject.losses[:1]:  # whatever has moved shows here
                loss.verdict()
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


CONTRACT = "function(policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T]"
DISTILLATION_CONTRACT = "function(student_logits [B, T, V], teacher_logits [B, T, V], tokens [B, T], mask [B, T]) -> []"


def function_subject(path: str, *, means: Direction = "reverse") -> Subject:
    """Prepare a function for an audit: a KL or a whole loss, or, with four arguments, a loss of distillation."""
    import torch

    from klamp.audit.examine import Distillation, Subject, Term, called

    function = load_function(path)
    if _takes(function, 4) and not _takes(function, 2):
        loss = Distillation(name=path, loss=lambda batch: function(*batch.aligned), means=means)
        return Subject(title=path, losses=(loss,))
    policy = torch.full((2, 3), -1.0, dtype=torch.float64)
    forms = f"it is called as {CONTRACT}, or as {DISTILLATION_CONTRACT}, with float64 tensors and nothing else"
    called(function, policy, policy - 0.5, name=path, forms=forms)
    return Subject(title=path, losses=(Term(name=path, function=function, means=means),))


def load_function(path: str) -> Callable[..., Any]:
    """Import the function that `module:function` or `module:Class.method` names; the working directory is searched too.

    Raises:
        UnknownNameError: the module has no such function; names the nearest.
        ConfigError: it cannot be imported, or is not callable.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            "this does not name a function", got=repr(path), why="it needs a module and a name", fix="module:function"
        )
    module = _import(module_name, path)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise unknown_name("function", attribute, names, why=str(error)) from None
    if not callable(found):
        raise ConfigError(f"{path} is no function", got=type(found).__name__, fix=f"name one that is: {CONTRACT}")
    return found


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _import(name: str, path: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"{name} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            why=f"klamp audit {path} looks in the working directory and in the installed packages",
            fix="run it where `python -c 'import ...'` of that module works",
        ) from error


__all__ = ["CONTRACT", "DISTILLATION_CONTRACT", "HOSTS", "Host", "load_function", "load_subject"]
