"""Audits any KL function that can be imported, by `klamp audit module:function`."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.errors import ConfigError, unknown_name

if TYPE_CHECKING:  # torch is loaded with the first subject: the help needs the names alone
    from klamp.audit.examine import Subject

CONTRACT = "function(policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T]"


def function_subject(path: str) -> Subject:
    """Prepare a function for an audit, as a loss and as a number in the reward.

    Args:
        path: `module:function` or `module:Class.method`; modules of the working directory are found too.

    Raises:
        ConfigError: it cannot be imported, is not callable, or not with what it would be audited with.
    """
    from klamp.audit.examine import Subject, Term

    function = load_function(path)
    _try(function, path)
    return Subject(
        title=path,
        terms=(Term.of_function("as a loss", function), Term.of_function("in the reward", function, use="reward")),
    )


def load_function(path: str) -> Callable[..., Any]:
    """Import the function that `module:function` names.

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


def _try(function: Callable[..., Any], path: str) -> None:
    """Call a function as the audit will, with the log-probabilities of two completions of three tokens.

    Raises:
        ConfigError: it takes other arguments, fails, or returns no tensor.
    """
    import torch

    from klamp.core.arguments import describe

    policy = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    try:
        found = function(policy, policy.detach() - 0.5)
    except Exception as error:  # the user's code, which may raise anything
        first_line = " ".join(str(error).split())[:300]
        raise _unfit(path, f"{type(error).__name__}: {first_line}") from error
    if not isinstance(found, torch.Tensor):
        raise _unfit(path, f"it returned {describe(found)}")


def _unfit(path: str, got: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be called as an audit calls it",
        got=got,
        why=f"it is called as {CONTRACT}, with float64 tensors and nothing else",
        fix="name a function of that form; one with more arguments needs a wrapper: def kl(policy, ref): return "
        "yours(policy, ref, mask=torch.ones_like(policy))",
    )


def _import(name: str, path: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"{name} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            why=f"klamp audit {path} looks in the working directory and in the installed packages",
            fix="run it where `python -c 'import ...'` of that module works",
        ) from error
