"""What the server computes of one datum against klamp's core, token by token, as far apart as +-100 nats in float32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.core.objective import Objective
from klamp.core.penalty import token_penalty
from klamp.core.surrogates import ppo_clip
from klamp.core.term import KLTerm
from klamp.core.types import Batch
from klamp.hosts.tinker.server_formula import INPUTS, datum_loss

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # vmap runs the core on stand-ins for tensors

POLICY = -110.0
NATS = (-100.0, -95.0, -89.0, -88.0, -30.0, -1.5, -1.0, -0.25, 0.0, 1e-4, 0.7, 17.0, 60.0, 88.0, 89.0, 100.0)
DELTA, LOG_W = (torch.tensor(column) for column in zip(*itertools.product(NATS, NATS), strict=True))
"""Every pair of log policy - log ref and log policy - log behavior, one token each."""

TERMS = [
    KLTerm(value=value, gradient=gradient, **bounds)
    for value, gradient, bounds in itertools.product(
        ("k1", "k2", "k3", "abs"),
        ("reverse", "forward", "own", "none"),
        (
            {},
            {"off_policy": "token"},
            {"off_policy": "token", "max_weight": 1.05},
            {"max_log_ratio": 3.0},
            {"off_policy": "token", "max_weight": 20.0, "max_log_ratio": 90.0},
        ),
    )
]


def rows(**changes: Tensor) -> dict[str, Tensor]:
    """The rows of a datum for each pair: one token, no surrogate, a KL of weight 1."""
    policy, ones = torch.full_like(DELTA, POLICY), torch.ones_like(DELTA)
    columns = (policy - LOG_W, policy - DELTA, 0 * ones, 0 * ones, ones, ones)
    return {
        name: column.unsqueeze(-1) for name, column in {**dict(zip(INPUTS, columns, strict=True)), **changes}.items()
    }


def on_server(term: KLTerm, **changes: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient and metrics of each datum."""
    logprobs = torch.full((len(DELTA), 1), POLICY, requires_grad=True)
    given = rows(**changes)
    found, metrics = torch.vmap(datum_loss(Objective(beta=1.0, kl=term)))(logprobs, *(given[name] for name in INPUTS))
    return found.detach(), torch.autograd.grad(found.sum(), logprobs)[0].squeeze(-1), metrics


def in_core(term: KLTerm) -> tuple[Tensor, Tensor]:
    """Penalty and gradient of each token."""
    policy = torch.full((len(DELTA), 1), POLICY, requires_grad=True)
    batch = Batch(
        policy_logprobs=policy,
        mask=torch.ones(len(DELTA), 1, dtype=torch.bool),
        advantages=torch.zeros(len(DELTA)),
        ref_logprobs=policy.detach() - DELTA[:, None],
        sampler_logprobs=policy.detach() - LOG_W[:, None],
    )
    penalty = token_penalty(batch, term)
    return penalty.detach().squeeze(-1), torch.autograd.grad(penalty.sum(), policy)[0].squeeze(-1)


def text(term: KLTerm) -> str:
    bounds = [f"{name}={x:g}" for name in ("max_weight", "max_log_ratio") if (x := getattr(term, name)) is not None]
    return " ".join([term.value, term.gradient, term.off_policy, *bounds])


@pytest.mark.parametrize("term", TERMS, ids=text)
def test_value_and_gradient_of_every_token_are_the_cores(term: KLTerm) -> None:
    (value, slope, _), (expected, expected_slope) = on_server(term), in_core(term)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-6, atol=0, equal_nan=True)
    sound = expected_slope.isfinite()
    torch.testing.assert_close(value[sound], expected[sound], rtol=1e-6, atol=0, equal_nan=True)
    assert not value[~sound].isfinite().any(), "a gradient that overflowed shows in the loss"


def test_far_out_there_is_something_to_compare() -> None:
    """Else the test above would hold infinities against infinities."""
    for term in TERMS:
        value, slope = in_core(term)
        far = (DELTA.abs() >= 88) & (LOG_W.abs() >= 88)
        assert (value.isfinite() & slope.isfinite() & far).sum() >= 10, text(term)
    forward = KLTerm(gradient="forward", off_policy="token")
    (_, slope, _), (_, expected) = on_server(forward), in_core(forward)
    here = (DELTA == -95) & (LOG_W == -100)
    assert float(slope[here]) == float(expected[here]) == pytest.approx(-0.0067379, rel=1e-4)  # -exp(-100 + 95)


def test_a_token_without_a_weight_adds_nothing_wherever_it_is() -> None:
    nothing = torch.zeros_like(DELTA)
    for term in TERMS:
        value, slope, metrics = on_server(term, kl_weights=nothing, kl_shares=nothing)
        assert not value.any() and not slope.any(), text(term)
        assert not any(metric.any() for metric in metrics.values())


@pytest.mark.parametrize("advantage", [-1.0, 0.5])
def test_the_surrogate_is_the_cores(advantage: float) -> None:
    ones, none = torch.ones_like(DELTA), torch.zeros_like(DELTA)
    changes: dict[str, Any] = {"advantages": advantage * ones, "policy_weights": ones}
    value, slope, _ = on_server(KLTerm(), kl_weights=none, kl_shares=none, **changes)
    policy = torch.full((len(DELTA), 1), POLICY, requires_grad=True)
    expected = ppo_clip(policy, policy.detach() - LOG_W[:, None], torch.full((len(DELTA),), advantage))
    torch.testing.assert_close(value, expected.detach().squeeze(-1), rtol=1e-6, atol=0)
    (expected_slope,) = torch.autograd.grad(expected.sum(), policy)
    torch.testing.assert_close(slope, expected_slope.squeeze(-1), rtol=1e-6, atol=0, equal_nan=True)
