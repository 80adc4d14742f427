"""Log-probabilities straight from hidden states, without the [N, V] matrix of logits.

The vocabulary is walked in tiles (see `tiles`). The forward pass keeps one normaliser per tile and token; the backward
pass needs each tile again. So products of the forward pass are kept in the memory that the gradient of the weight will
take anyway: all of them where N <= H, those of H rows where N > H; the rest is computed again. Forward and backward
take three matrix products (N <= H) to four (N >> H). Where the head is frozen the gradient of `linear_logprobs` is
formed in the forward pass: two products in all.

Extra memory: a few tiles, O(N H), and the gradients themselves; no second [V, H]. Where a weight of 2^20 entries or
more learns, its gradient is allocated in the forward pass and lives until the backward pass or until the result is
dropped. One call per weight has it at a time: another one, before that backward pass, computes its products again, as
a second walk through a retained graph does. Nothing is kept under no_grad, or for a weight that needs no gradient.
Rows whose incoming gradient is exactly 0 take no part in the backward pass: they cost nothing, and whatever stands
there (NaN too) reaches no gradient.

On a CUDA device `linear_logprobs` in up to 32 bits runs through the Triton kernels of `_triton` where Triton is
installed (four products, nothing kept), which have been tested through the interpreter only; `KLAMP_TRITON=0` in the
environment switches them off. `linear_kl` uses the tiles everywhere.

For one row with hidden state h and target t: logits z_v, p = softmax(z), w_v the row of the weight, s_v the slope of
cap and temperature (1 without). The vocabulary is cut into tiles T_1 ... T_c; Z_i = sum over v in T_i of exp(z_v)::

    log p_t = z_t - log Z                   Z = sum_i Z_i, from the log Z_i by one logsumexp over the c tiles
    entropy = sum_i P_i H_i - sum_i P_i log P_i         P_i = Z_i / Z, H_i the entropy within a tile
    d log p_t / d z_v = 1[v = t] - p_v
    d log p_t / d h = (1 - p_t) s_t w_t - sum over v != t of p_v s_v w_v

The last line is formed in the forward pass where only the hidden states learn (`pull`). The Z in its p_v is not known
before the last tile, so the sum is kept as sum exp(z_v - peak) s_v w_v, `peak` being the largest logit so far: where a
tile raises the peak, the sum so far is multiplied by exp(old peak - new peak); after the last tile all of it is
multiplied by exp(peak - log Z). The target's own term stays apart, in the backward pass too, as
1 - p_t = -expm1(log p_t), exact where p_t is nearly 1.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.core.arguments import IDS, check_flag, check_tensors
from klamp.core.gradients import applied, first_only
from klamp.core.heads.tiles import (
    Head,
    Owner,
    Products,
    TileGradient,
    cast_inputs,
    check_head,
    check_scale,
    exp_,
    find_columns,
    head_gradients,
    keep,
    opaque,
    owner_of,
    tiles,
)
from klamp.core.masking import upcast
from klamp.errors import ConfigError, ShapeError


class _Scores(NamedTuple):
    logprobs: Tensor
    normaliser: Tensor  # log sum exp of the logits
    entropy: Tensor | None
    pull: Tensor | None  # d logprob / d hidden


def _kernels(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """The Triton kernels, or None where this machine or these tensors do not allow them: then tiles are used."""
    fits = hidden.is_cuda and hidden.shape[0] > 0 and hidden.dtype != torch.float64 and weight.is_contiguous()
    if not fits or os.environ.get("KLAMP_TRITON") == "0":
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return None  # not even compiled for these
    try:
        from klamp.core.heads import _triton
    except ImportError:
        return None
    return _triton


def _together(normalisers: Tensor, entropies: Tensor | None, picked: Tensor) -> _Scores:
    """Normaliser, entropy and log-probability of the whole vocabulary from those of its parts, [parts, N] each."""
    normaliser = normalisers.logsumexp(0)
    if entropies is not None:
        share = (normalisers - normaliser).exp()
        entropies = (torch.where(share > 0, share * entropies, 0) - torch.xlogy(share, share)).sum(0)
    return _Scores((picked - normaliser).clamp_(max=0), normaliser, entropies, None)


def _rest(found: _Scores) -> Tensor:
    """1 - p of each target: exact where p is nearly 1, and 0 in a vocabulary of one entry, however large its logit."""
    return -torch.expm1(found.logprobs)


def _score(products: Products, targets: Tensor, *, entropy: bool, pull: bool) -> _Scores:
    """One walk over the vocabulary: the log-probabilities, and on request the entropy and the gradient of hidden."""
    hidden, head = products.hidden, products.head
    columns, chunks = tiles(hidden, head.weight)
    n, low = hidden.shape[0], torch.finfo(upcast(hidden[:0]).dtype).min
    normalisers = hidden.new_empty(len(columns), n, dtype=upcast(hidden[:0]).dtype)
    entropies = torch.zeros_like(normalisers) if entropy else None
    picked, steep = torch.zeros_like(normalisers[0]), torch.ones_like(normalisers[0])
    others = torch.zeros_like(hidden, dtype=picked.dtype) if pull else None
    peak = torch.full_like(picked, low)
    for i, entries in enumerate(columns):
        for rows in chunks:
            z, slope = head.logits(products.form(rows, entries))
            column, inside = find_columns(targets[rows], entries)
            picked[rows] += torch.where(inside, z.gather(1, column), 0)[:, 0]
            top = z.amax(1, keepdim=True).clamp(min=low)
            p = exp_(z.sub_(top).clone() if entropy else z.sub_(top))
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
                product = p.to(hidden.dtype) @ head.weight[entries]  # sum exp(z_v - top) s_v w_v of this tile
                others[rows] *= (peak[rows] - new).exp()[:, None]
                others[rows] += product * (top[:, 0] - new).exp()[:, None]
                peak[rows] = new
    found = _together(normalisers, entropies, picked)
    if others is None:
        return found
    own = (_rest(found) * steep)[:, None] * head.weight[targets]
    return found._replace(pull=own - others * (peak - found.normaliser).exp()[:, None])


def _tile_gradient(products: Products, targets: Tensor, grad: Tensor, normaliser: Tensor, rest: Tensor) -> TileGradient:
    """d loss / d product, tile by tile: grad (1 at the target - p), times the slope of cap and temperature."""

    def of_tile(rows: slice, entries: slice) -> Tensor:
        z, slope = products.head.logits(products.recall(rows, entries))
        column, inside = find_columns(targets[rows], entries)
        d = exp_(z.sub_(normaliser[rows])).mul_(-grad[rows])
        d = d.scatter_(1, column, torch.where(inside, grad[rows] * rest[rows], d.gather(1, column)))
        return d if slope is None else d.mul_(slope)

    return of_tile


class LinearLogprobs(torch.autograd.Function):
    """The log-probability of each row's target, and on request the row's entropy (without gradient); both in nats.

    Takes hidden, weight, bias (or None), targets, (temperature, softcap), the owner of the weight (see `tiles`),
    whether anything learns, and whether the entropy is wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: tuple[float, float | None],
        owner: Owner,
        learns: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probabilities and entropies, [N]; keeps what the gradient needs and no matrix of logits."""
        ctx.scale, ctx.hidden_dtype = scale, hidden.dtype
        head, ctx.kernels, ctx.kept = Head(weight, bias, *scale), _kernels(hidden, weight), None
        if ctx.kernels is not None:
            found = _together(*ctx.kernels.score(hidden, head, targets, entropy=entropy))
        else:
            # Only hidden learns: its gradient is linear in the incoming one, so it is formed here and never again.
            pull = learns and ctx.needs_input_grad[:3] == (True, False, False)
            ctx.kept = keep(owner, hidden, weight) if learns and ctx.needs_input_grad[1] else None
            found = _score(Products(head, hidden, ctx.kept), targets, entropy=entropy, pull=pull)
        if found.pull is not None:
            ctx.save_for_backward(found.pull)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, found.normaliser, _rest(found))
        if found.entropy is not None:
            ctx.mark_non_differentiable(found.entropy)
        return found.logprobs, found.entropy

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of hidden states and head, in one more walk over the vocabulary."""
        grad, saved = grads[0], ctx.saved_tensors  # asked for once: checkpointing of activations allows no more
        if len(saved) == 1:
            pulled = torch.where(grad[:, None] == 0, 0, grad[:, None] * saved[0])
            return (pulled.to(ctx.hidden_dtype), *[None] * 7)
        hidden, weight, bias, targets, normaliser, rest = saved
        kept, ctx.kept = ctx.kept, None  # written over here: a second walk computes the products again
        head = Head(weight, bias, *ctx.scale)
        products = Products(head, hidden, kept)

        def make(index: Tensor | slice, some: Tensor) -> TileGradient:
            g, t, norm, left = grad[index], targets[index], normaliser[index], rest[index]
            if ctx.kernels is not None:
                return ctx.kernels.tile_gradient(some, head, t, g, norm, left)
            return _tile_gradient(products.of(index, some), t, g[:, None], norm[:, None], left[:, None])

        with torch.autocast(hidden.device.type, enabled=False):
            place = None if kept is None else kept.place
            found = head_gradients(grad, hidden, head, ctx.needs_input_grad, make, place)
        return (*found, *[None] * 5)


def _check_targets(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_tensors(IDS, like=hidden, targets=targets)
    if targets.shape != hidden.shape[:1]:
        raise ShapeError(
            "the targets do not fit the hidden states",
            got=f"targets {tuple(targets.shape)} of {targets.dtype}, hidden {tuple(hidden.shape)}",
            why="each row of hidden scores one token id",
            fix="pass one integer id per row",
        )
    wrong = (targets < 0) | (targets >= weight.shape[0])
    if bool(wrong.any()):
        raise ConfigError(
            "a target lies outside the vocabulary",
            got=f"{int(wrong.sum())} of {targets.numel()}, the first {int(targets[wrong][0])}",
            why=f"the head has entries 0 to {weight.shape[0] - 1}",
            fix="put any valid id where the mask is False; a row without gradient costs no backward pass",
        )


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    check_head("the", hidden, weight, bias)
    _check_targets(hidden, weight, targets)
    check_scale(temperature, softcap)
    options = ((temperature, softcap), owner_of(weight), torch.is_grad_enabled(), entropy)
    given = cast_inputs(hidden, weight, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        return applied(LinearLogprobs, *given, targets.long(), *options)


@overload
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows"],
    *,
    bias: Float[Tensor, " vocab"] | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    return_entropy: Literal[False] = ...,
) -> Float[Tensor, " rows"]: ...
@overload
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows"],
    *,
    bias: Float[Tensor, " vocab"] | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    return_entropy: Literal[True],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]: ...
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Float[Tensor, " rows"] | tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The log-probability of one token per row, in nats, from hidden states, without the logits in memory.

    Equation (in this order: head, soft cap c, temperature)::

        raw = hidden @ weight^T + bias       capped = c tanh(raw / c)       logits = capped / temperature
        logprobs_n = logits_n[targets_n] - log sum_v exp(logits_nv)
        entropy_n  = - sum_v p_nv log p_nv,  p = softmax(logits)

    Value: exact up to rounding, <= 0. bfloat16 and float16: products rounded as in a linear layer, the softmax and all
    sums in float32; the result is float32. float64 stays float64.
    Gradient: that of the equation in hidden, weight and bias, each computed only if it requires one; once
    differentiable. A row whose incoming gradient is exactly 0 is left out: it costs no product, its gradient is 0, and
    NaN in it reaches nothing. The entropy is detached.
    Shapes: [N, H], [V, H], [N], bias [V] -> [N], with `return_entropy` ([N], [N]). N may be 0.
    Under torch.compile the call is a graph break (not for fullgraph=True); under autocast the inputs are cast as those
    of a linear layer.

    Args:
        hidden: last hidden states, one row per token.
        weight: of the output head; may be tied to the embedding, or frozen.
        targets: token ids to score, each in 0..V-1.
        bias: of the output head.
        temperature: that the tokens were sampled at; times s for a head whose logits are divided by s (`logits_scaling`
            in Granite), over s for one whose logits are multiplied by it (`logit_scale` in Cohere).
        softcap: c, of models that bound their logits (30 in Gemma 2).
        return_entropy: return (logprobs, entropy) instead of logprobs.

    Raises:
        ShapeError: shapes that do not fit.
        ConfigError: a target outside the vocabulary, temperature or softcap <= 0, or two types without autocast.

    Source: Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009 (tiles, without its gradient filter)
    """
    check_flag("return_entropy", return_entropy)
    found = opaque(_logprobs, hidden, weight, bias, targets, temperature, softcap, return_entropy)
    return cast(tuple[Tensor, Tensor], found) if return_entropy else found[0]
