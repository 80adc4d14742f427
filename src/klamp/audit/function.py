"""A function of somebody's own: imported by its name, called, and judged at any log-ratio.

A function that returns one number per token is a KL. One that returns a scalar may hold a policy loss too: what the
reference changes in its gradient is the KL's part.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klamp.audit.capture import Capture, roundoff
from klamp.audit.conclude import Reading
from klamp.audit.verdict import Verdict, finding
from klamp.core.arguments import describe
from klamp.errors import ConfigError, text_of, unknown_name
from klamp.files import at_home, with_end

CONTRACT = "function(policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T]"
DISTILLATION_CONTRACT = "function(student_logits [B, T, V], teacher_logits [B, T, V], tokens [B, T], mask [B, T]) -> []"
REACH = 3.0  # the largest log-ratio that is tried, in nats


def load_function(path: str) -> Callable[..., Any]:
    """Import what `module:function`, `module:Class.method` or `path/to/file.py:function` names, also from this folder.

    Raises:
        UnknownNameError: the module has no such function; names the nearest.
        ConfigError: it cannot be imported, or is not callable.
    """
    module, _, attribute = path.rpartition(":")
    # a console script does not have the working directory on its path; at the end of the path it hides nothing
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        if module.endswith(".py"):
            loaded: Any = SimpleNamespace(**runpy.run_path(str(with_end(at_home(module)))))
        else:
            loaded = import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing runs the user's code, which may raise anything
        got, why = text_of(error), "it is looked for in this folder and in the installed packages"
        fix = "run from the folder that holds the module, put it on PYTHONPATH, or write path/to/file.py:function"
        raise ConfigError(f"{path} cannot be imported", got=got, why=why, fix=fix) from error
    try:
        function = attrgetter(attribute)(loaded)
    except AttributeError as error:
        public = [name for name, value in vars(loaded).items() if callable(value) and name[0] != "_"]
        raise unknown_name("function", attribute, public, why=str(error)) from None
    if not callable(function):
        raise ConfigError(f"{path} is no function", got=type(function).__name__, why="it is called", fix="name one")
    return function


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def check_function(
    function: Callable[..., Tensor], *, example: tuple[Tensor, Tensor] | None = None, means: str = "reverse"
) -> Verdict:
    """The verdict on a KL or a loss, a function of (policy_logprobs, ref_logprobs), [B, T] each, to [B, T] or a scalar.

    `example`: log-probabilities that the function accepts; None: 8 completions of 8 tokens in float64.

    Raises:
        ConfigError: the function cannot be called so, or returns no tensor with a gradient.
    """
    policy = torch.linspace(-4, -0.2, 64, dtype=torch.float64).reshape(8, 8) if example is None else example[0].detach()
    shuffled = torch.randperm(policy.numel(), generator=torch.Generator().manual_seed(0))
    steps = torch.linspace(-REACH, REACH, policy.numel() + 1, dtype=torch.float64)[1:][shuffled].reshape(policy.shape)
    ref = policy - steps.to(policy)
    value, gradient = _called(function, policy, ref)
    value_at, at = _called(function, policy, policy)
    pull = gradient if value.ndim else gradient - at
    near = _called(function, policy, policy - 0.05)[1]  # a token beyond a clamp is not one that the function leaves out
    moved = gradient.abs() + at.abs() + near.abs() > 0
    dtype = str(policy.dtype).removeprefix("torch.")
    summary = f"a function of {policy.numel()} tokens, {dtype}, up to {REACH:g} nats"
    if not moved.any():
        return Verdict.of([finding("kl-detached")], summary=summary, kl="none")
    if not (pull[moved].abs() > 1e-6 * gradient.abs().max()).any():
        what = "the reference changes the loss's value and not its gradient (k1 differentiated, or a detached KL)"
        absent = finding("kl-absent", seen=": the reference changes neither value nor gradient")
        inert = finding("kl-zero", what=what) if bool((value - value_at).abs().max() > 0) else absent
        return Verdict.of([inert], summary=summary, kl="none")
    tensors = {"policy_logprobs": policy, "ref_logprobs": ref, "gradient": pull, "mask": moved}
    arrays = {name: np.atleast_2d(x.double().cpu().numpy()) for name, x in tensors.items()}
    facts = {"means": means, "beta": 1.0, "eps": roundoff(torch.finfo(policy.dtype).eps)}
    verdict = Reading(Capture(arrays=arrays | {"mask": arrays["mask"] > 0}, facts=facts), []).verdict()
    findings = [x for x in verdict.findings if x.code not in ("beta-scale", "few-tokens")]  # there is no batch
    if value.ndim and bool((value < 0).any()) and bool(value_at.abs().max() < 1e-6):
        findings.append(finding("value-negative"))
    left = {"masks, means, beta and the numbers of a batch": "check a micro-batch"}
    explanation = verdict.found.removeprefix("no policy loss; ")
    return Verdict.of(findings, summary=summary, found=explanation, kl=verdict.kl, not_checked=left)


def _called(function: Callable[..., Tensor], policy: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a foreign function, and the gradient of its sum in the policy's log-probabilities."""
    leaf, value, cause = policy.clone().requires_grad_(), None, None
    try:
        value = function(leaf, ref)
        got = f"it returned {describe(value)}"
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        got, cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", error
    if not isinstance(value, Tensor) or not value.is_floating_point():
        why = f"it is called as {CONTRACT}, or as {DISTILLATION_CONTRACT}"
        fix = "name a function of that form, or wrap yours: lambda policy, ref: yours(policy, ref, mask)"
        raise ConfigError("an audit cannot call the function", got=got, why=why, fix=fix) from cause
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), torch.zeros_like(policy) if gradient is None else gradient
