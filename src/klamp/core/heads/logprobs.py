"""Log-probabilities straight from hidden states, without the [N, V] matrix of logits.

The vocabulary is walked in tiles. The forward pass keeps one normaliser per tile and token; the backward pass reads
each tile's products again, or computes them (see `tiles`): three matrix products where N <= H, up to four where N is
larger. Where the head is frozen the gradient of `linear_logprobs` is formed in the forward pass: two products in all.
Extra memory: a few tiles, O(N H), and the gradients themselves; no second [V, H].

For one row with hidden state h and target t: logits z_v, p = softmax(z), w_v the row of the weight, s_v the slope of
cap and temperature (1 without). The vocabulary is cut into tiles T_1 ... T_c; Z_i = sum over v in T_i of exp(z_v)::

    log p_t = z_t - log Z                   Z = sum_i Z_i, from the log Z_i by one logsumexp over the c tiles
    entropy = sum_i P_i H_i - sum_i P_i log P_i         P_i = Z_i / Z, H_i the entropy within a tile
    d log p_t / d z_v = 1[v = t] - p_v
    d log p_t / d h = (1 - p_t) s_t w_t - sum over v != t of p_v s_v w_v

The last line is formed in the forward pass where only the hidden states learn (`pull`). Its p_v need Z, which is known
after the last tile: so the sum is kept as sum exp(z_v - peak) s_v w_v, `peak` being the largest logit so far, scaled to
each new peak, and at last by exp(peak - log Z). The target's own term stays apart, as 1 - p_t = -expm1(log p_t), exact
where p_t is nearly 1.

Of several tokens per row, t_1 ... t_K with incoming gradients g_k and g their sum, all is found in the same walk; also
the k likeliest, which are targets that the walk itself finds (`Leaders`)::

    d loss / d z_v = (sum over k with t_k = v of g_k) - g p_v
    d loss / d h = sum_k g_k s_k w_k - g sum_v p_v s_v w_v           the last sum is kept where only h learns
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from klamp.core.arguments import AT_LEAST_0, IDS, check_flag, check_number, check_tensors
from klamp.core.gradients import first_only
from klamp.core.heads.tiles import (
    Head,
    Normaliser,
    Products,
    TileGradient,
    Walk,
    check_head,
    exp_,
    head_gradients,
    lend,
    log_sum,
    opaque,
    run_walk,
    tiles,
)
from klamp.core.masking import upcast
from klamp.errors import ConfigError, ShapeError

BLOCK = 16
"""Entries of a tile that are looked at together: only where their largest is among a row's k is each one compared."""


class Picks:
    """The token ids to score in each row, [N, K], sorted so that a tile finds its own at once.

    `rows` and `ids` hold each token of a row once, [U]; `order` are the places [N K] of the tokens, sorted, and `group`
    says which of the U each place asks for.
    """

    def __init__(self, ids: Tensor) -> None:
        self.height = len(ids)
        flat, self.order = torch.sort(ids.flatten(), stable=True)
        rows = self.order // max(1, ids.shape[1])
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = (flat[1:] != flat[:-1]) | (rows[1:] != rows[:-1])
        self.group = first.cumsum(0) - 1
        self.rows, self.ids = rows[first], flat[first]

    def within(self, rows: slice, entries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Which tokens are in a tile, and their row and column there."""
        ends = torch.tensor((entries.start, entries.stop), device=self.ids.device)
        first, end = (int(place) for place in torch.searchsorted(self.ids, ends))
        which = torch.arange(first, end, device=self.ids.device)
        row = self.rows[which] - rows.start
        if rows.start > 0 or rows.stop < self.height:
            which, row = (x[(row >= 0) & (row < rows.stop - rows.start)] for x in (which, row))
        return which, row, self.ids[which] - entries.start


class Leaders:
    """The k largest entries of some rows and their ids, in the tiles so far."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = self.ids = torch.empty(0)

    def add(self, z: Tensor, start: int) -> None:
        """Takes in a tile, whose first column is the entry `start` of the vocabulary."""
        if self.values.numel() == 0:
            self.values, self.ids = z[:, :0], torch.empty_like(z[:, :0], dtype=torch.long)
        ids = torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
        if self.values.shape[1] == self.k > 0:
            z, ids = _challengers(z, ids, self.values.amin(1, keepdim=True))
        values, ids = torch.cat((self.values, z), 1), torch.cat((self.ids, ids), 1)
        best, order = values.topk(min(self.k, values.shape[1]), 1, sorted=False)
        self.ids = ids.gather(1, order)
        self.values = best.clamp_(min=torch.finfo(z.dtype).min)  # above what pads challengers, and is no entry

    def ranked(self) -> tuple[Tensor, Tensor]:
        """The entries and their ids, the largest first."""
        values, order = self.values.sort(1, descending=True)
        return torch.where(values > torch.finfo(values.dtype).min, values, -torch.inf), self.ids.gather(1, order)


def _challengers(z: Tensor, ids: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a tile above their row's limit, packed to the left, with some others; and their ids."""
    stride = z.shape[1] // BLOCK
    whole = z[:, : stride * BLOCK].view(len(z), BLOCK, stride)
    row, block = (whole.amax(1) > limit).nonzero(as_tuple=True)
    some = whole[row, :, block]
    which, member = (some > limit[row]).nonzero(as_tuple=True)
    row, column = row[which], member * stride + block[which]
    count = torch.bincount(row, minlength=len(z))
    place = torch.arange(len(row), device=z.device) - (count.cumsum(0) - count)[row]
    entries = z.new_full((len(z), int(count.max())), -torch.inf)
    names = torch.zeros_like(entries, dtype=torch.long)
    entries[row, place], names[row, place] = some[which, member], ids[0, column]
    return torch.cat((entries, z[:, stride * BLOCK :]), 1), torch.cat((names, ids[:, stride * BLOCK :]), 1)


class RowScores(NamedTuple):
    """What one walk over the vocabulary finds in N rows."""

    logprobs: Tensor  # [N, K]
    normaliser: Tensor  # log sum exp of the logits, see `log_sum`
    entropy: Tensor | None
    ids: Tensor  # [N, K]
    pull: Tensor | None = None  # of one target d logprob / d hidden [N, H], of several sum_v p_v s_v w_v


class TopTokens(NamedTuple):
    """The k likeliest tokens of each row, the likeliest first: ids, log-probabilities, and the targets'."""

    ids: Int[Tensor, "rows k"]
    logprobs: Float[Tensor, "rows k"]
    target_logprobs: Float[Tensor, " rows"] | None


def _together(normalisers: Tensor, entropies: Tensor | None, picked: Tensor, ids: Tensor) -> RowScores:
    """Normaliser, entropy and log-probabilities of the whole vocabulary from its parts', [parts, N] each."""
    normaliser = normalisers.logsumexp(0)
    if entropies is not None:
        share = (normalisers - normaliser).exp()
        entropies = (torch.where(share > 0, share * entropies, 0) - torch.xlogy(share, share)).sum(0).to(picked.dtype)
    logprobs = (picked - normaliser[:, None]).clamp_(max=0).to(picked.dtype)
    return RowScores(logprobs, normaliser, entropies, ids)


def _rest(logprobs: Tensor) -> Tensor:
    """1 - p of each target: exact where p is nearly 1, and 0 in a vocabulary of one entry, however large its logit."""
    return -torch.expm1(logprobs)


def score(products: Products, ids: Tensor, *, entropy: bool = False, pull: bool = False, top_k: int = 0) -> RowScores:
    """One walk over the vocabulary: log-probabilities of the `top_k` likeliest and of the ids, entropy, pull."""
    hidden, head = products.hidden, products.head
    columns, chunks = tiles(hidden, head.weight)
    n, low = hidden.shape[0], torch.finfo(upcast(hidden[:0]).dtype).min
    empty = upcast(hidden[:0, 0])
    normalisers = empty.new_empty(len(columns), n, dtype=log_sum(empty, empty).dtype)
    entropies = empty.new_zeros(len(columns), n) if entropy else None
    picks, leaders = Picks(ids), [Leaders(top_k) for _ in chunks] if top_k else []
    alone = ids.shape[1] == 1 and not leaders
    picked = torch.zeros_like(picks.ids, dtype=empty.dtype)
    steep = torch.ones_like(picked)
    mean = torch.zeros_like(hidden, dtype=picked.dtype) if pull else None
    peak = empty.new_full((n,), low)
    for i, entries in enumerate(columns):
        for c, rows in enumerate(chunks):
            z = head.logits(products.form(rows, entries))
            slope = head.slope(z) if pull else None
            which, row, column = picks.within(rows, entries)
            picked[which] = z[row, column]
            if leaders:
                leaders[c].add(z, entries.start)
            top = z.amax(1, keepdim=True).clamp(min=low)
            p = exp_(z.sub_(top).clone() if entropy else z.sub_(top))
            total = p.sum(1)
            normalisers[i, rows] = log_sum(total, top[:, 0])
            if entropies is not None:  # both terms are >= 0; past -800 nothing is left of the exponential
                entropies[i, rows] = total.log() - (p * z.clamp_(min=-800)).sum(1) / total
            if mean is not None:
                if alone:  # without the target itself, whose own part is 1 - p: no cancellation where it is certain
                    p[row, column] = 0
                if slope is not None:
                    p *= slope
                    steep[which] = slope.expand_as(p)[row, column]
                new = torch.maximum(peak[rows], top[:, 0])
                product = p.to(hidden.dtype) @ head.weight[entries]  # sum exp(z_v - top) s_v w_v of this tile
                mean[rows] *= (peak[rows] - new).exp()[:, None]
                mean[rows] += product * (top[:, 0] - new).exp()[:, None]
                peak[rows] = new
    logits = empty.new_empty(ids.numel()).scatter_(0, picks.order, picked[picks.group]).view(ids.shape)
    if leaders:
        best, order = (torch.cat(x) for x in zip(*(chunk.ranked() for chunk in leaders), strict=True))
        logits, ids = torch.cat((best, logits), 1), torch.cat((order, ids), 1)
    made = _together(normalisers, entropies, logits, ids)
    if mean is None:
        return made
    mean *= (peak - made.normaliser).exp()[:, None].to(mean.dtype)
    if not alone:
        return made._replace(pull=mean)
    own = _rest(made.logprobs) * empty.new_empty(n).scatter_(0, picks.order, steep)[:, None]
    return made._replace(pull=own * head.weight[ids[:, 0]] - mean)


def _tile_gradient(products: Products, ids: Tensor, grad: Tensor, normaliser: Tensor, logprobs: Tensor) -> TileGradient:
    """d loss / d product, tile by tile: each token's gradient less the row's times p, times the slope of the logits."""
    picks, total, (near, rest) = Picks(ids), grad.sum(1, keepdim=True), Normaliser.of(normaliser, logprobs.dtype)
    own = grad.new_zeros(len(picks.ids)).index_add_(0, picks.group, grad.flatten()[picks.order])
    log_p = own.new_empty(own.shape).index_copy_(0, picks.group, logprobs.flatten()[picks.order])
    own = own * _rest(log_p) - (total[picks.rows, 0] - own) * log_p.exp()

    def of_tile(rows: slice, entries: slice) -> Tensor:
        z = products.head.logits(products.recall(rows, entries))
        slope = products.head.slope(z)
        d = exp_(z.sub_(near[rows])).mul_(-total[rows] * (-rest[rows]).exp())
        which, row, column = picks.within(rows, entries)
        d[row, column] = own[which]
        return d if slope is None else d.mul_(slope)

    return of_tile


class LinearLogprobs(torch.autograd.Function):
    """The log-probability of each row's tokens, and on request the row's entropy (without gradient); both in nats."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, walk: Walk
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probabilities [N, K], entropies [N], ids [N, K]; keeps what the gradient needs, no matrix of logits."""
        ctx.scale, ctx.hidden_dtype, alone = walk.scale, hidden.dtype, ids.shape[1] == 1 and walk.top_k == 0
        head = Head(weight, bias, *walk.scale)
        # Only hidden learns: its gradient is linear in the incoming one, so it is formed here and never again.
        pull = walk.learns and ctx.needs_input_grad[:3] == (True, False, False)
        ctx.buffer = lend(walk.owner, hidden, weight) if walk.learns and ctx.needs_input_grad[1] else None
        scores = score(Products(head, hidden, ctx.buffer), ids, entropy=walk.entropy, pull=pull, top_k=walk.top_k)
        ids, logprobs = scores.ids, scores.logprobs
        if scores.pull is None:
            ctx.save_for_backward(hidden, weight, bias, ids, scores.normaliser, logprobs.clone())
        elif alone:
            ctx.save_for_backward(scores.pull)
        else:
            ctx.save_for_backward(
                scores.pull, weight, ids, head.slope((logprobs + scores.normaliser[:, None]).to(logprobs.dtype))
            )
        ctx.mark_non_differentiable(*(x for x in (scores.entropy, ids) if x is not None))
        return logprobs, scores.entropy, ids

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of hidden states and head, in one more walk over the vocabulary."""
        grad, saved = grads[0], ctx.saved_tensors  # asked for once: checkpointing of activations allows no more
        live = (grad != 0).any(1)
        if len(saved) != 6:
            pulled = grad * saved[0] if len(saved) == 1 else _pulled(grad, *saved)
            return (torch.where(live[:, None], pulled, 0).to(ctx.hidden_dtype), *[None] * 4)
        hidden, weight, bias, ids, normaliser, logprobs = saved
        buffer, ctx.buffer = ctx.buffer, None  # written over here: a second walk computes the products again

        def make(index: Tensor | slice, some: Products) -> TileGradient:
            return _tile_gradient(some, ids[index], grad[index], normaliser[index][:, None], logprobs[index])

        products = Products(Head(weight, bias, *ctx.scale), hidden, buffer)
        return (*head_gradients(products, live, ctx.needs_input_grad, make), None, None)


def _pulled(grad: Tensor, mean: Tensor, weight: Tensor, ids: Tensor, slope: Tensor | None) -> Tensor:
    """The gradient of the hidden states for K tokens of each row, without a matrix [N, K, H]."""
    factor = (grad if slope is None else grad * slope).to(weight.dtype)
    own = embedding_bag(ids, weight, per_sample_weights=factor, mode="sum") if ids.numel() else 0
    return own - grad.sum(1, keepdim=True) * mean


def _check_targets(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_tensors(IDS, like=hidden, targets=targets)
    if targets.ndim not in (1, 2) or targets.shape[:1] != hidden.shape[:1]:
        raise ShapeError(
            "the targets do not fit the hidden states",
            got=f"targets {tuple(targets.shape)} of {targets.dtype}, hidden {tuple(hidden.shape)}",
            why="each row of hidden scores one token id, or K ids",
            fix="pass one integer id per row, or [N, K]",
        )
    wrong = (targets < 0) | (targets >= weight.shape[0])
    if bool(wrong.any()):
        raise ConfigError(
            "a target lies outside the vocabulary",
            got=f"{int(wrong.sum())} of {targets.numel()}, the first {int(targets[wrong][0])}",
            why=f"the head has entries 0 to {weight.shape[0] - 1}",
            fix="put any valid id where the mask is False; a row without gradient costs no backward pass",
        )


@opaque
def logprobs_of(
    hidden: Tensor, head: Head, targets: Tensor | None, *, entropy: bool = False, top_k: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probabilities [N, K], entropies and ids [N, K] of the `top_k` likeliest tokens, then of the targets."""
    check_head("the", hidden, head)
    ids = hidden.new_empty(len(hidden), 0, dtype=torch.long)
    if targets is not None:
        _check_targets(hidden, head.weight, targets)
        ids = targets.long()[:, None] if targets.ndim == 1 else targets.long()
    top_k = min(top_k, len(head.weight))
    return run_walk(LinearLogprobs, head, hidden, head.weight, head.bias, ids, entropy=entropy, top_k=top_k)


@overload
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows *k"],
    *,
    bias: Float[Tensor, " vocab"] | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    return_entropy: Literal[False] = ...,
) -> Float[Tensor, " rows *k"]: ...
@overload
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows *k"],
    *,
    bias: Float[Tensor, " vocab"] | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    return_entropy: Literal[True],
) -> tuple[Float[Tensor, " rows *k"], Float[Tensor, " rows"]]: ...
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows *k"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Float[Tensor, " rows *k"] | tuple[Float[Tensor, " rows *k"], Float[Tensor, " rows"]]:
    """The log-probability of one token per row, or of K, in nats, from hidden states, without the logits in memory.

    Equation (in this order: head, soft cap c, temperature)::

        raw = hidden @ weight^T + bias       capped = c tanh(raw / c)       logits = capped / temperature
        logprobs_n = logits_n[targets_n] - log sum_v exp(logits_nv)
        entropy_n  = - sum_v p_nv log p_nv,  p = softmax(logits)

    Value: exact up to rounding, <= 0. bfloat16 and float16: products rounded as in a linear layer, the softmax and all
    sums in float32; the result is float32. float64 stays float64.
    Gradient: the equation's in hidden, weight and bias, each only if it requires one; once differentiable. A row
    whose incoming gradient is exactly 0 costs no product, and NaN in it reaches nothing. The entropy is detached.
    Shapes: [N, H], [V, H], [N] or [N, K], bias [V] -> the targets' shape, with `return_entropy` and [N]. N and K may
    be 0, and a row may name a token twice. All K take one walk over the vocabulary, and no memory of [N, K, H].
    Under torch.compile the call is a graph break (not for fullgraph=True); under autocast the inputs are cast as those
    of a linear layer.

    Args:
        hidden: last hidden states, one row per token.
        weight, bias: of the output head; may be tied to the embedding, or frozen.
        targets: token ids to score, each in 0..V-1.
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
    check_tensors(IDS, targets=targets)
    head = Head(weight, bias, temperature, softcap)
    logprobs, entropy, _ = logprobs_of(hidden, head, targets, entropy=return_entropy)
    logprobs = logprobs.view(targets.shape)
    return (logprobs, cast(Tensor, entropy)) if return_entropy else logprobs


def linear_topk(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    k: int,
    *,
    targets: Int[Tensor, " rows"] | None = None,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> TopTokens:
    """The k likeliest tokens of each row and their log-probabilities, in the walk that scores the targets.

    Equation, Value, Gradient: as in `linear_logprobs` at fixed ids; of equally likely tokens any may be left
    out. They are found tile by tile: one walk over the vocabulary serves policy loss and head.
    Shapes: [N, H], [V, H], targets [N], bias [V] -> ids [N, k], log-probabilities [N, k] and [N]; k is V at most.

    Raises:
        ShapeError, ConfigError: as `linear_logprobs`, and where k is no whole number >= 0.
    """
    check_number("k", k, AT_LEAST_0, whole=True)
    logprobs, _, ids = logprobs_of(hidden, Head(weight, bias, temperature, softcap), targets, top_k=k)
    if targets is None:
        return TopTokens(ids, logprobs, None)
    return TopTokens(ids[:, :-1], logprobs[:, :-1], logprobs[:, -1])
