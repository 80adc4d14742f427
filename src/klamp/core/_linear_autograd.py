"""Forward and backward passes of `linear_logprobs` and `linear_kl`, one tile at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from klamp.core.estimators import DIRECTIONS
from klamp.core.masking import upcast
from klamp.core.tiles import Head, LogitGradient, find_columns, head_gradients, tiles
from klamp.core.types import Direction


class _Scores(NamedTuple):
    logprobs: Tensor
    normaliser: Tensor  # log sum exp of the logits
    entropy: Tensor | None
    pull: Tensor | None  # d logprob / d hidden


def _score(hidden: Tensor, head: Head, targets: Tensor, *, entropy: bool, pull: bool) -> _Scores:
    """One walk over the vocabulary: the log-probabilities, and on request the entropy and the gradient of hidden."""
    columns, chunks = tiles(hidden, head.weight)
    n, low = hidden.shape[0], torch.finfo(upcast(hidden[:0]).dtype).min
    normalisers = hidden.new_empty(len(columns), n, dtype=upcast(hidden[:0]).dtype)
    entropies = torch.zeros_like(normalisers) if entropy else None
    picked, steep = torch.zeros_like(normalisers[0]), torch.ones_like(normalisers[0])
    others = torch.zeros_like(hidden, dtype=picked.dtype) if pull else None
    peak = torch.full_like(picked, low)
    for i, entries in enumerate(columns):
        for rows in chunks:
            z, slope = head.logits(hidden[rows], entries)
            column, inside = find_columns(targets[rows], entries)
            picked[rows] += torch.where(inside, z.gather(1, column), 0)[:, 0]
            top = z.amax(1, keepdim=True).clamp(min=low)
            p = z.sub_(top).exp() if entropy else z.sub_(top).exp_()
            total = p.sum(1)
            normalisers[i, rows] = total.log() + top[:, 0]
            if entropies is not None:  # both terms are >= 0; past -800 nothing is left of the exponential
                entropies[i, rows] = total.log() - (p * z.clamp_(min=-800)).sum(1) / total
            if others is not None:
                # Without the target itself, whose own part is 1 - p: no cancellation where it is nearly certain.
                p.scatter_add_(1, column, torch.where(inside, -p.gather(1, column), 0))
                if slope is not None:
                    p *= slope
                    own = slope.expand_as(p).gather(1, column)
                    steep[rows] = torch.where(inside, own, steep[rows][:, None])[:, 0]
                new = torch.maximum(peak[rows], top[:, 0])
                product = p.to(hidden.dtype) @ head.weight[entries]
                others[rows] *= (peak[rows] - new).exp()[:, None]
                others[rows] += product * (top[:, 0] - new).exp()[:, None]
                peak[rows] = new
    normaliser = normalisers.logsumexp(0)
    logprobs = (picked - normaliser).clamp_(max=0)
    if entropies is not None:
        share = (normalisers - normaliser).exp()
        entropies = (torch.where(share > 0, share * entropies, 0) - torch.xlogy(share, share)).sum(0)
    if others is not None:
        own = (-torch.expm1(logprobs) * steep)[:, None] * head.weight[targets]
        others = own - others * (peak - normaliser).exp()[:, None]
    return _Scores(logprobs, normaliser, entropies, others)


class LinearLogprobs(torch.autograd.Function):
    """(hidden, weight, bias, targets, (temperature, softcap, learns, entropy)) -> (logprobs, entropy or None)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        ctx.options, learns, entropy = options[:2], *options[2:]
        ctx.hidden_dtype = hidden.dtype
        head = Head(weight, bias, *ctx.options)
        # Only hidden learns: its gradient is linear in the incoming one, so it is formed here and never again.
        pull = learns and ctx.needs_input_grad[:3] == (True, False, False)
        found = _score(hidden, head, targets, entropy=entropy, pull=pull)
        kept = (found.pull,) if found.pull is not None else (hidden, weight, bias, targets, found.normaliser)
        ctx.save_for_backward(*kept)
        if found.entropy is not None:
            ctx.mark_non_differentiable(found.entropy)
        return found.logprobs, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grads[0]
        if len(ctx.saved_tensors) == 1:
            pulled = torch.where(grad[:, None] == 0, 0, grad[:, None] * ctx.saved_tensors[0])
            return pulled.to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors

        def make(index: Tensor | slice) -> LogitGradient:
            g, t, norm = grad[index][:, None], targets[index], normaliser[index][:, None]

            def of_logits(z: Tensor, rows: slice, entries: slice) -> Tensor:
                column, inside = find_columns(t[rows], entries)
                d = z.sub_(norm[rows]).exp_().mul_(-g[rows])
                return d.scatter_add_(1, column, torch.where(inside, g[rows], 0))

            return of_logits

        with torch.autocast(hidden.device.type, enabled=False):
            found = head_gradients(grad, hidden, Head(weight, bias, *ctx.options), ctx.needs_input_grad, make)
        return *found, None, None


class LinearKL(torch.autograd.Function):
    """(hidden, weight, ref_hidden, ref_weight, direction) -> KL per row; the reference gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, direction: Direction
    ) -> Tensor:
        policy, ref = (hidden, Head(weight)), (ref_hidden, Head(ref_weight))
        value, center, log_z, ref_log_z = _divergence(policy, ref, direction)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, center, log_z, ref_log_z)
        ctx.direction = direction
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, ref_hidden, ref_weight, *rest = ctx.saved_tensors
        ref, slope = Head(ref_weight), _SLOPES[ctx.direction]

        def make(index: Tensor | slice) -> LogitGradient:
            g, center, log_z, ref_log_z = (x[index][:, None] for x in (grads[0], *rest))
            h = ref_hidden[index]

            def of_logits(z: Tensor, rows: slice, entries: slice) -> Tensor:
                log_p = z.sub_(log_z[rows])
                log_q = ref.logits(h[rows], entries)[0].sub_(ref_log_z[rows])
                return slope(log_p, log_q, center[rows]).mul_(g[rows])

            return of_logits

        with torch.autocast(hidden.device.type, enabled=False):
            found = head_gradients(grads[0], hidden, Head(weight), (*ctx.needs_input_grad[:2], False), make)
        return *found[:2], None, None, None


def _reverse_slope(log_p: Tensor, log_q: Tensor, center: Tensor) -> Tensor:
    return log_p.sub(log_q).sub_(center).mul_(log_p.exp())


def _forward_slope(log_p: Tensor, log_q: Tensor, center: Tensor) -> Tensor:
    return log_p.exp().sub_(log_q.exp())


def _js_slope(log_p: Tensor, log_q: Tensor, center: Tensor) -> Tensor:
    return _reverse_slope(log_p, torch.logaddexp(log_p, log_q) - math.log(2), center).div_(2)


# d KL / d logits of the policy, per entry; the center is the mean of the first bracket under the policy.
_SLOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "reverse": _reverse_slope,
    "forward": _forward_slope,
    "js": _js_slope,
}


def _reverse(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p (exp(-delta) - 1 + delta), the terms of `exact_kl`, in fewer passes where nothing can overflow."""
    delta = log_p - log_q
    if not bool(delta.abs().amax() <= 60):
        return DIRECTIONS["reverse"](log_p, log_q)
    return delta.neg().expm1_().add_(delta).mul_(log_p.exp()).sum(-1)


_Model = tuple[Tensor, Head]


def _divergence(policy: _Model, ref: _Model, direction: Direction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, center of the slope, and the two normalisers, each [N].

    By the chain rule the KL is that of the tiles' masses plus the mean of the KL within each tile: every term is
    >= 0, one walk is enough, and no sum of large numbers cancels. JS has no such rule; it takes a second walk.
    """
    columns, chunks = tiles(policy[0], policy[1].weight)
    log_z = policy[0].new_empty(2, len(columns), policy[0].shape[0], dtype=upcast(policy[0][:0]).dtype)
    within = torch.zeros_like(log_z[0])

    def walk(visit: Callable[[int, slice, Tensor, Tensor], None]) -> None:
        for i, entries in enumerate(columns):
            for rows in chunks:
                z, ref_z = (head.logits(hidden[rows], entries)[0] for hidden, head in (policy, ref))
                visit(i, rows, z, ref_z.to(z.dtype))

    def each_tile(i: int, rows: slice, z: Tensor, ref_z: Tensor) -> None:
        log_z[0, i, rows], log_z[1, i, rows] = z.logsumexp(1), ref_z.logsumexp(1)
        if direction != "js":
            z, ref_z = z.sub_(log_z[0, i, rows, None]), ref_z.sub_(log_z[1, i, rows, None])
            within[i, rows] = _reverse(z, ref_z) if direction == "reverse" else _reverse(ref_z, z)

    walk(each_tile)
    total, ref_total = log_z.logsumexp(1)
    mass, ref_mass = log_z[0] - total, log_z[1] - ref_total
    if direction != "js":
        share = (mass if direction == "reverse" else ref_mass).exp()
        value = DIRECTIONS[direction](mass.t(), ref_mass.t()) + torch.where(share > 0, share * within, 0).sum(0)
        return value, value, total, ref_total
    halves = torch.zeros_like(log_z[:, 0])

    def against_the_mean(i: int, rows: slice, z: Tensor, ref_z: Tensor) -> None:
        log_p, log_q = z.sub_(total[rows, None]), ref_z.sub_(ref_total[rows, None])
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        halves[0, rows] += _reverse(log_p, log_m)
        halves[1, rows] += _reverse(log_q, log_m)

    walk(against_the_mean)
    return halves.mean(0), halves[0], total, ref_total
