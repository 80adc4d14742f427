"""Checks a loss that is given as a function: it is tried at any log-ratio, so that policy loss and KL come apart.

A function that returns one number per token is a KL. One that returns a scalar may hold a policy loss too: what the
reference changes in its gradient is the KL's part. `klamp audit module:function` asks the same and prints a table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from klamp.audit.conclude import judge_kinds
from klamp.audit.findings import finding
from klamp.audit.fit import Explanation, explain
from klamp.audit.forms import Array, Tokens, roundoff
from klamp.audit.verdict import Finding, Verdict
from klamp.core.arguments import describe
from klamp.errors import ConfigError

REACH = 3.0
"""The largest log-ratio that is tried, in nats."""


def check_function(
    function: Callable[..., Tensor], *, example: tuple[Tensor, Tensor] | None = None, means: str = "reverse"
) -> Verdict:
    """The verdict on a function of (policy_logprobs, ref_logprobs), [B, T] each, that returns [B, T] or a scalar.

    Args:
        function: the KL, or a whole loss.
        example: log-probabilities that it accepts; None: 8 completions of 8 tokens in float64.
        means: the divergence that is meant.

    Raises:
        ConfigError: the function cannot be called so, or returns no tensor with a gradient.
    """
    policy = torch.linspace(-4, -0.2, 64, dtype=torch.float64).reshape(8, 8) if example is None else example[0].detach()
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(policy.numel(), generator=generator)
    steps = torch.linspace(-REACH, REACH, policy.numel() + 1, dtype=torch.float64)[1:][shuffled].reshape(policy.shape)
    delta = steps.to(policy)
    value, gradient = called(function, policy, policy - delta)
    value_at, at = called(function, policy, policy)
    per_token = value.ndim > 0
    pull = gradient if per_token else gradient - at
    near = called(function, policy, policy - 0.05)[1]  # a token beyond a clamp is not one that the function leaves out
    moved = np.abs(gradient) + np.abs(at) + np.abs(near) > 0
    reacts = bool(np.any(np.abs(pull[moved]) > 1e-6 * np.abs(gradient).max(initial=0))) if moved.any() else False
    summary = f"a function of {policy.numel()} tokens, {str(policy.dtype).removeprefix('torch.')}, up to {REACH:g} nats"
    if not reacts:
        return Verdict.of([_inert(value, value_at, bool(moved.any()))], summary=summary, kl="none")
    tokens = _tokens(policy, delta, pull, moved)
    explained = explain(tokens)
    kl, findings = _named(explained, means, tokens)
    found = explained.fits[0].kl.name if kl != "unknown" and explained.fits and explained.fits[0].kl else ""
    if per_token and bool((value < 0).any()) and bool(value_at.abs().max() < 1e-6):
        findings.append(finding("value-negative"))
    return Verdict.of(
        findings,
        summary=summary,
        found=f"KL, gradient {found}" if found else "",
        kl=kl,
        not_checked={"masks, means, beta and the numbers of a batch": "check a micro-batch"},
    )


FORMS = "it is called as function(policy_logprobs, ref_logprobs), with the shape of the example"


def called(
    function: Callable[..., Tensor], policy: Tensor, ref: Tensor, *, name: str = "the function", forms: str = FORMS
) -> tuple[Tensor, Array]:
    """The value of a foreign function, and the gradient of its sum in the policy's log-probabilities.

    Raises:
        ConfigError: it takes other arguments, fails, or returns no tensor.
    """
    leaf, value, cause = policy.detach().clone().requires_grad_(), None, None
    try:
        value = function(leaf, ref.detach())
        got = f"it returned {describe(value)}"
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        got, cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", error
    if not isinstance(value, Tensor) or not value.is_floating_point():
        fix = "name a function of that form, or wrap yours: lambda policy, ref: yours(policy, ref, mask)"
        raise ConfigError(f"{name} cannot be called as an audit calls it", got=got, why=forms, fix=fix) from cause
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    array = np.zeros(policy.shape) if gradient is None else gradient.double().cpu().numpy()
    return value.detach(), array


def _inert(value: Tensor, at: Tensor, trained: bool) -> Finding:
    if not trained:
        return finding("kl-detached")
    if bool((value - at).abs().max() > 0):
        what = "the reference changes the loss's value and not its gradient (k1 differentiated, or a detached KL)"
        return finding("kl-zero", what=what)
    return finding("kl-absent", seen=": the reference changes neither value nor gradient")


def _tokens(policy: Tensor, delta: Tensor, pull: Array, moved: Array) -> Tokens:
    rows = np.broadcast_to(np.arange(len(pull)).reshape(-1, *[1] * (pull.ndim - 1)), pull.shape)[moved]
    logp = policy.double().cpu().numpy()[moved]
    return Tokens(
        gradient=pull[moved],
        policy=logp,
        ref=(policy - delta).double().cpu().numpy()[moved],
        row=np.unique(rows, return_inverse=True)[1],
        eps=roundoff(torch.finfo(policy.dtype).eps),
    )


def _named(explained: Explanation, means: str, tokens: Tokens) -> tuple[str, list[Finding]]:
    if explained.stage == "unknown":
        away = float((tokens.gradient * tokens.d < 0).mean())
        return "unknown", [
            finding("unknown", what=f"no known KL has this gradient; it pushes {away:.0%} of tokens away")
        ]
    fit = explained.fits[0]
    direction = fit.signs[1] if explained.stage == "free" else int(np.sign(fit.b))
    kl, findings = judge_kinds(explained.kinds, direction, means)
    if fit.bounds is not None:
        findings.append(finding("kl-clamped", low=fit.bounds[0], high=fit.bounds[1]))
    return kl, findings
