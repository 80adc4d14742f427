"""Coarse numbers, step zero, few tokens, packed rows, scaled, checkpointed and compiled losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.audit.bench import numerics
from tests.audit.bench.sound import k3, ppo
from tests.audit.bench.worlds import BETA, Case, Score, World, make_world, verdict_of, worth_of
from torch import Tensor

import klamp
from klamp.core.gradients import first_only


def scored(title: str, pairs: Iterable[tuple[Case, World]], step: int = 1) -> Score:
    """The verdicts on cases with worlds of their own."""
    score = Score(title)
    for case, world in [*pairs][::step]:
        verdict = verdict_of(case, world)
        score.add(case.name, worth_of(case, verdict), verdict)
    return score


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_coarse_numbers_accuse_nobody(step: int) -> None:
    score = scored("coarse", numerics.coarse(), step)
    assert score.counts["accused"] == 0, str(score)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_layouts_change_no_verdict(step: int) -> None:
    score = scored("layouts", numerics.layouts(), step)
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= 0.95, str(score)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_first_steps_accuse_nobody(step: int) -> None:
    score = scored("first steps", numerics.near_zero(), step)
    assert score.counts["accused"] == score.counts["wrong name"] == 0, str(score)
    assert score.share() >= 0.6, str(score)


def test_at_step_zero_the_derivatives_tell_or_the_verdict_stays_open() -> None:
    world = make_world(40, drift=0, lag=0)
    score = scored("step zero", ((case, world) for case in numerics.at_zero()))
    assert score.share() == 1, str(score)


# losses that refuse a second derivative


class Penalty(torch.autograd.Function):
    """beta times the sum of ratio x k3, differentiable once."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, ref: Tensor) -> Tensor:
        ctx.save_for_backward(logp, ref)
        return k3(logp - ref)

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logp, ref = ctx.saved_tensors
        return grads[0] * (logp - ref), None


def once_differentiable(w: World) -> Tensor:
    """PPO's loss beside it."""
    kl = Penalty.apply(w.logp, w.ref)
    assert isinstance(kl, Tensor)
    return w.token(ppo(w) + BETA * kl)


def compiled(backend: str) -> Callable[[World], Tensor]:
    """A loss function that torch compiles."""

    def loss(logp: Tensor, ref: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Tensor:
        r, d = (logp - old).exp(), logp - ref
        tokens = torch.maximum(-a * r, -a * r.clamp(0.8, 1.2)) + BETA * r * (torch.expm1(-d) + d)
        return (tokens * m).sum() / m.sum()

    function = torch.compile(loss, backend=backend, dynamic=False)
    return lambda w: function(w.logp, w.ref, w.old, w.a, w.m)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_loss_is_named(backend: str) -> None:
    case = Case("compiled", compiled(backend))
    verdict = verdict_of(case, make_world(41))
    assert worth_of(case, verdict) == "right", str(verdict)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("loss", [*BACKENDS, "once"])
def test_where_a_second_derivative_is_refused_the_verdict_is_cannot_tell_and_never_an_exception(
    loss: str, watched: bool
) -> None:
    function = once_differentiable if loss == "once" else compiled(loss)
    world = make_world(42, drift=0, lag=0)
    verdict = verdict_of(Case("refuses", function), world.watch() if watched else world)
    assert verdict.ok is None, str(verdict)
    assert loss != "once" or "no-second-derivative" in verdict.codes(), str(verdict)
    far = make_world(43)
    watched_far = verdict_of(Case("refuses", function), far.watch() if watched else far)
    assert watched_far.ok is not False, str(watched_far)


def test_the_gradient_of_training_stays_bit_for_bit_the_same() -> None:
    gradients = []
    for checked in (False, True):
        world = make_world(44, drift=0, lag=0)
        loss = world.token(ppo(world) + BETA * world.live * k3(world.d))
        if checked:
            klamp.check(loss, once=False, beta=BETA, **world.arguments())
        loss.backward()
        assert world.logits.grad is not None
        gradients.append(world.logits.grad)
    assert torch.equal(*gradients)
