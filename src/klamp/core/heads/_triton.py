"""Triton kernels of `linear_logprobs` for GPUs: the logits of a block exist in its registers only.

Forward, one kernel: each program walks a part of the vocabulary for a block of rows and keeps running sums (largest
logit, sum of exponentials, their mean logit for the entropy) and the target's logit; torch adds up the parts.
Backward, one kernel per tile: the gradient with respect to the head's product, in the type of the hidden states; the
two products with it are torch's. Sums are float32; unlike in the tiles the product itself is not rounded to 16 bits.

Tested through Triton's interpreter against float64, and compiled for sm_80 and sm_90, but never run on a GPU so far:
block sizes are untuned and speed is unknown. `KLAMP_TRITON=0` in the environment goes back to the tiles.
Nothing imports this module but the first call that needs it.
"""
# A kernel takes its pointers and sizes one by one, and has no types that a checker knows.
# ruff: noqa: PLR0913, PLR0917
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.core.heads.tiles import Head, TileGradient

PROGRAMS = 1024
"""About how many programs the forward pass is split into."""
BLOCKS = {4: (64, 64, 32, 4, 2), 2: (128, 128, 32, 8, 3)}
"""Bytes per number -> rows, vocabulary entries and width of a block; warps and stages."""


@triton.jit
def _block_logits(
    hidden, weight, bias, rows, columns, n_rows, n_columns, width, temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The logits of a block, and d logits / d product. Row and column numbers are int64: V H may pass 2^31."""
    inside_rows, inside_columns = rows[:, None] < n_rows, columns[None, :] < n_columns
    z = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, width, WIDTH):
        k = start + tl.arange(0, WIDTH)
        of_hidden = hidden + rows[:, None] * width + k[None, :]
        of_weight = weight + columns[None, :] * width + k[:, None]
        x = tl.load(of_hidden, mask=inside_rows & (k[None, :] < width), other=0.0)
        w = tl.load(of_weight, mask=inside_columns & (k[:, None] < width), other=0.0)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        z = tl.dot(x, w, z, input_precision="ieee")
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=columns < n_columns, other=0.0).to(tl.float32)[None, :]
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_CAP:
        bounded = 2 * tl.sigmoid(2 * z / softcap) - 1  # tanh(z / softcap)
        z, slope = softcap * bounded, 1 - bounded * bounded
    return z / temperature, slope / temperature


@triton.jit
def _score_kernel(
    hidden, weight, bias, targets, normalisers, entropies, picked,
    n_rows, n_columns, per_part, width, temperature, softcap,
    ENTROPY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """For one part of the vocabulary: log sum exp, the entropy within the part, the target's logit if it is there."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, live = tl.program_id(1), rows < n_rows
    begin = part * per_part
    end = tl.minimum(begin + per_part, n_columns)
    target = tl.load(targets + rows, mask=live, other=-1)
    top = tl.full((ROWS,), -3.0e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    lean = tl.zeros((ROWS,), tl.float32)
    hit = tl.zeros((ROWS,), tl.float32)
    for first in range(begin, end, COLUMNS):
        columns = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        z, _ = _block_logits(
            hidden, weight, bias, rows, columns, n_rows, end, width, temperature, softcap,
            HAS_BIAS, HAS_CAP, WIDEN, WIDTH,
        )  # fmt: skip
        z = tl.where(columns[None, :] < end, z, float("-inf"))
        hit += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
        new = tl.maximum(top, tl.max(z, 1))
        p, shrink = tl.exp(z - new[:, None]), tl.exp(top - new)
        if ENTROPY:  # sum of p times the logit, below the largest one: nothing cancels
            lean = shrink * (lean + total * (top - new)) + tl.sum(tl.where(p > 0, p * (z - new[:, None]), 0.0), 1)
        total = total * shrink + tl.sum(p, 1)
        top = new
    tl.store(normalisers + part * n_rows + rows, top + tl.log(total), mask=live)
    if ENTROPY:
        tl.store(entropies + part * n_rows + rows, tl.log(total) - lean / total, mask=live)
    tl.store(picked + rows, hit, mask=live & (target >= begin) & (target < end))


@triton.jit
def _gradient_kernel(
    hidden, weight, bias, targets, grad, normaliser, rest, out,
    n_rows, begin, end, width, temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d loss / d product of one block: grad (1 at the target - p), times the slope of cap and temperature."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = begin + tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    live = rows < n_rows
    target = tl.load(targets + rows, mask=live, other=-1)
    g = tl.load(grad + rows, mask=live, other=0.0)[:, None]
    norm = tl.load(normaliser + rows, mask=live, other=0.0)[:, None]
    z, slope = _block_logits(
        hidden, weight, bias, rows, columns, n_rows, end, width, temperature, softcap,
        HAS_BIAS, HAS_CAP, WIDEN, WIDTH,
    )  # fmt: skip
    left = tl.load(rest + rows, mask=live, other=0.0)[:, None]
    d = tl.where(columns[None, :] == target[:, None], g * left, -g * tl.exp(z - norm)) * slope
    place = out + rows[:, None] * (end - begin) + (columns - begin)[None, :]
    tl.store(place, d, mask=live[:, None] & (columns[None, :] < end))


# The interpreter multiplies the bits of bfloat16 numbers, not the numbers, and rounds to them by truncation. So there
# blocks are multiplied in float32 (the same products), and torch rounds the gradient. Every version of Triton tells
# the two apart by what its decorator makes of a kernel.
WIDEN = not isinstance(_score_kernel, triton.JITFunction)


def _options(head: Head) -> tuple[tuple[float, float], dict[str, Any]]:
    """The arguments that both kernels take last: temperature, cap, and what they are compiled for."""
    rows, columns, width, warps, stages = BLOCKS[head.weight.element_size()]
    compiled = {
        "HAS_BIAS": head.bias is not None,
        "HAS_CAP": head.softcap is not None,
        "WIDEN": WIDEN,
        "ROWS": rows,
        "COLUMNS": columns,
        "WIDTH": width,
        "num_warps": warps,
        "num_stages": stages,
    }
    return (float(head.temperature), float(head.softcap or 0)), compiled


def _packed(*tensors: Tensor | None) -> list[Any]:
    """The tensors in contiguous memory; the kernels know no strides."""
    return [None if x is None else x.contiguous() for x in tensors]


def score(hidden: Tensor, head: Head, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The normaliser and entropy of each part of the vocabulary, [parts, N], and each target's logit, [N]."""
    n, v, (scale, compiled) = hidden.shape[0], head.weight.shape[0], _options(head)
    blocks = triton.cdiv(n, compiled["ROWS"])
    per_part = triton.cdiv(triton.cdiv(v, compiled["COLUMNS"]), triton.cdiv(PROGRAMS, blocks)) * compiled["COLUMNS"]
    normalisers = hidden.new_empty(triton.cdiv(v, per_part), n, dtype=torch.float32)
    entropies = torch.empty_like(normalisers) if entropy else None
    picked = normalisers.new_empty(n)
    tensors = _packed(hidden, head.weight, head.bias, targets, normalisers, entropies, picked)
    with torch.cuda.device_of(hidden):
        grid = blocks, normalisers.shape[0]
        _score_kernel[grid](*tensors, n, v, per_part, hidden.shape[1], *scale, ENTROPY=entropy, **compiled)
    return normalisers, entropies, picked


def tile_gradient(
    hidden: Tensor, head: Head, targets: Tensor, grad: Tensor, normaliser: Tensor, rest: Tensor
) -> TileGradient:
    """The gradient of the log-probabilities with respect to the product of a tile, in the type of the hidden states.

    `rest` is 1 - p of each target.
    """
    scale, compiled = _options(head)
    hidden, weight, bias, targets = _packed(hidden, head.weight, head.bias, targets)
    grad, normaliser, rest = _packed(grad, normaliser, rest)

    def of_tile(rows: slice, entries: slice) -> Tensor:
        n, width = rows.stop - rows.start, entries.stop - entries.start
        out = hidden.new_empty(n, width, dtype=torch.float32 if WIDEN else hidden.dtype)
        grid = triton.cdiv(n, compiled["ROWS"]), triton.cdiv(width, compiled["COLUMNS"])
        tensors = (hidden[rows], weight, bias, targets[rows], grad[rows], normaliser[rows], rest[rows], out)
        with torch.cuda.device_of(hidden):
            _gradient_kernel[grid](*tensors, n, entries.start, entries.stop, hidden.shape[1], *scale, **compiled)
        return out

    return of_tile
