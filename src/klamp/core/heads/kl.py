"""The exact KL of two heads straight from hidden states, one tile of the vocabulary at a time; see `logprobs`, too.

For one row, z and y are the logits of the policy and the reference, p = softmax(z), q = softmax(y). The vocabulary is
cut into tiles T_1 ... T_c, of which only one is in memory. Three steps give the KL and its gradient:

1. Within a tile (`_within`). All sums over v in T_i; p_v|i = p_v / P_i is the policy within the tile::

       log Z_i = log sum_v exp(z_v)        log Y_i = log sum_v exp(y_v)        K_i = KL(p_.|i || q_.|i)

   Let m = sum_v p_v|i (y_v - z_v), the mean shift, and x_v = y_v - z_v - m. Then K_i = -m - log Z_i + log Y_i and
   Y_i / Z_i = exp(m) sum_v p_v|i exp(x_v). Since the p_v|i sum to 1 and the p_v|i x_v to 0,

       K_i = log1p(sum_v p_v|i (expm1(x_v) - x_v))        log Y_i = log Z_i + m + K_i

   Every term is >= 0, so nothing cancels where policy and reference are nearly equal, and the second normaliser is had
   without exponentials of its own.

2. Tiles put together (`_divergence`). With Z = sum_i Z_i and Y = sum_i Y_i a tile has the mass P_i = Z_i / Z under the
   policy and Q_i = Y_i / Y under the reference. From p_v = P_i p_v|i and q_v = Q_i q_v|i follows the chain rule

       KL(p || q) = sum_i P_i log(P_i / Q_i) + sum_i P_i K_i

   The first sum is a KL of c numbers. Only log Z_i, log Y_i and K_i are kept of a tile, [c, N] each. For KL(q || p) the
   two change places. The Jensen-Shannon divergence needs m_v = (p_v + q_v) / 2, and so both normalisers of the whole
   vocabulary: a second walk over the tiles, once these are known.

3. Backwards (`_SLOPES`), with d p_v / d z_u = p_v (1[u = v] - p_u)::

       d KL(p || q) / d z_u = p_u (log(p_u / q_u) - KL(p || q))
       d KL(q || p) / d z_u = p_u - q_u
       d JS(p, q) / d z_u   = p_u (log(p_u / m_u) - KL(p || m)) / 2

   since sum_v p_v d log p_v and sum_v m_v d log m_v are 0. What is subtracted is the mean of the logarithm under p, the
   `center` that the forward pass saves beside log Z and log Y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, FLOATS, IDS, check_number, check_tensors
from klamp.core.estimators import DIRECTIONS
from klamp.core.gradients import first_only
from klamp.core.heads.logprobs import logprobs_of, score
from klamp.core.heads.tiles import (
    Head,
    Normaliser,
    Products,
    Tile,
    TileGradient,
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
from klamp.core.topk import Tail, server_head, topk_kl_of
from klamp.core.types import Direction
from klamp.errors import ShapeError, check_name


class LinearKL(torch.autograd.Function):
    """The KL of each row, in nats, with a gradient for the policy only."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """The KL of each row, [N]; keeps what the gradient needs and no matrix of logits."""
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, walk = inputs
        learns = walk.learns and ctx.needs_input_grad[1] and weight.dtype == ref_weight.dtype
        ctx.buffer = lend(walk.owner, hidden, weight, heads=2) if learns else None
        policy = Products(Head(weight, bias, *walk.scale), hidden, ctx.buffer)
        ref = Products(Head(ref_weight, ref_bias, *walk.scale), ref_hidden, ctx.buffer, which=1)
        value, center, log_z, ref_log_z = _divergence(policy, ref, walk.direction)
        ctx.save_for_backward(*inputs[:-1], center, log_z, ref_log_z)
        ctx.walk = walk
        return value

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of the policy's hidden states and head, in one more walk over the vocabulary."""
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, *rest = ctx.saved_tensors
        buffer, ctx.buffer = ctx.buffer, None  # written over here: a second walk computes the products again
        policy = Products(Head(weight, bias, *ctx.walk.scale), hidden, buffer)
        ref = Products(Head(ref_weight, ref_bias, *ctx.walk.scale), ref_hidden, buffer, which=1)
        slope_of, head = _SLOPES[ctx.walk.direction], policy.head

        def make(index: Tensor | slice, mine: Products) -> TileGradient:
            g, center, *wide = (x[index][:, None] for x in (grads[0], *rest))
            totals, other = [Normaliser.of(x, center.dtype) for x in wide], ref.of(index)

            def of_tile(rows: slice, entries: slice) -> Tensor:
                z, ref_z = (model.head.logits(model.recall(rows, entries)) for model in (mine, other))
                slope, ref_z = head.slope(z), ref_z.to(z.dtype)
                log_z, ref_log_z = (Normaliser(*(x[rows] for x in total)) for total in totals)
                forbidden = None if bias is None else z.isneginf()
                if ref_bias is not None:  # an entry that rounds to p = 0 is worth 0 at any ratio
                    lost = ref_z.isneginf() & ((z - log_z.near).exp() == 0)
                    forbidden = lost if forbidden is None else forbidden | lost
                d = slope_of(z, ref_z, log_z, ref_log_z, center[rows]).mul_(g[rows])
                d = d if forbidden is None else d.masked_fill_(forbidden, 0)  # p log p is 0 there, not NaN
                return d if slope is None else d.mul_(slope)

            return of_tile

        return (*head_gradients(policy, grads[0], ctx.needs_input_grad[:3], make), *[None] * 4)


# The slopes of step 3, each in the memory of the two logits that it is given.


def _reverse_slope(z: Tensor, ref_z: Tensor, log_z: Normaliser, ref_log_z: Normaliser, center: Tensor) -> Tensor:
    log_p, log_q = z.sub_(log_z.near), ref_z.sub_(ref_log_z.near)
    d = torch.sub(log_p, log_q, out=log_q).sub_(center + log_z.rest - ref_log_z.rest)
    return d.mul_(exp_(log_p)).mul_((-log_z.rest).exp())


def _forward_slope(z: Tensor, ref_z: Tensor, log_z: Normaliser, ref_log_z: Normaliser, *_: Tensor) -> Tensor:
    p, q = exp_(z.sub_(log_z.near)).mul_((-log_z.rest).exp()), exp_(ref_z.sub_(ref_log_z.near))
    return p.addcmul_(q, (-ref_log_z.rest).exp(), value=-1)


def _js_slope(z: Tensor, ref_z: Tensor, log_z: Normaliser, ref_log_z: Normaliser, center: Tensor) -> Tensor:
    log_p, log_q = z.sub_(log_z.near).sub_(log_z.rest), ref_z.sub_(ref_log_z.near).sub_(ref_log_z.rest)
    return _above_mean(log_p, log_q).sub_(center).mul_(exp_(log_p)).div_(2)


_SLOPES: dict[str, Callable[..., Tensor]] = {"reverse": _reverse_slope, "forward": _forward_slope, "js": _js_slope}


def _within(z: Tensor, other: Tensor, spare: tuple[Tile, Tile]) -> tuple[Tensor, Tensor, Tensor]:
    """Step 1: log Z_i, log Y_i and K_i of one tile, each [n], from its logits z and y = `other`; z is overwritten."""
    x = torch.sub(other, z, out=spare[0].shaped(*z.shape))
    low, high = x.aminmax()
    if not bool(high - low <= 60):  # exp(x) could overflow, or an entry is forbidden and x is infinite or NaN
        sums = _normaliser_of(z), _normaliser_of(other)
        log_p, log_q = (_less(y.clone(), total) for y, total in zip((z, other), sums, strict=True))
        return *sums, DIRECTIONS["reverse"](log_p, log_q)
    top = z.amax(1, keepdim=True)  # the largest logit is subtracted before exp and added to log Z_i again
    p = exp_(z.sub_(top))  # not yet divided by its total
    total = p.sum(1, keepdim=True)
    terms = torch.mul(p, x, out=spare[1].shaped(*z.shape))
    center = terms.sum(1, keepdim=True).div_(total)  # m: x is y - z up to here, and less its mean from here on
    torch.expm1(x.sub_(center), out=terms).sub_(x)  # expm1(x) - x, >= 0
    gap = p.mul_(terms).sum(1).div_(total[:, 0]).log1p_()  # K_i
    log_z = log_sum(total, top)[:, 0]
    return log_z, log_z + (center[:, 0] + gap), gap


def _normaliser_of(z: Tensor) -> Tensor:
    """log sum exp of each row, [n], not rounded to the type of the logits."""
    top = z.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)  # -inf - -inf would be NaN
    return log_sum((z - top).exp_().sum(1, keepdim=True), top)[:, 0]


def _less(z: Tensor, log_z: Tensor) -> Tensor:
    """z - log Z, in the memory of z; a tile that a bias forbids as a whole stays -inf."""
    total = Normaliser.of(log_z.clamp(min=torch.finfo(z.dtype).min)[:, None], z.dtype)
    return z.sub_(total.near).sub_(total.rest)


def _above_mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log p - log m with m = (p + q) / 2, without cancellation where p and q are nearly equal."""
    return torch.sub(log_q, log_p).clamp_(max=60).expm1_().div_(2).log1p_().neg_()


def _to_mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The part of a tile in KL(p || m): the sum of p (exp(-delta) - 1 + delta), and of q / 2 where p is 0."""
    delta = _above_mean(log_p, log_q)
    terms = torch.expm1(-delta).add_(delta).mul_(log_p.exp())
    return torch.where(log_q - log_p < 60, terms, log_q.exp() / 2).sum(-1)


def _divergence(policy: Products, ref: Products, direction: Direction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 2: the divergence, the center of its slope, log Z and log Y, each [N]."""
    columns, chunks = tiles(policy.hidden, policy.head.weight)
    empty = upcast(policy.hidden[:0, 0])
    within = empty.new_zeros(len(columns), policy.hidden.shape[0])
    log_z = within.new_empty(2, *within.shape, dtype=log_sum(empty, empty).dtype)
    spare = Tile(within), Tile(within)
    p, q = (1, 0) if direction == "forward" else (0, 1)  # KL(p || q); 0 is the policy, 1 the reference

    def walk(product: Callable[..., Tensor], visit: Callable[[int, slice, Tensor, Tensor], None]) -> None:
        for i, entries in enumerate(columns):
            for rows in chunks:
                z, ref_z = (model.head.logits(product(model, rows, entries)) for model in (policy, ref))
                visit(i, rows, z, ref_z.to(z.dtype))

    def of_tile(i: int, rows: slice, z: Tensor, ref_z: Tensor) -> None:
        if direction == "js":
            log_z[0, i, rows], log_z[1, i, rows] = _normaliser_of(z), _normaliser_of(ref_z)
        else:
            pair = z, ref_z
            log_z[p, i, rows], log_z[q, i, rows], within[i, rows] = _within(pair[p], pair[q], spare)

    walk(Products.form, of_tile)
    total, ref_total = (x.logsumexp(0) for x in log_z)  # log Z, log Y
    v, lost = len(policy.head.weight), torch.zeros_like(total)  # lost: what the reference gives to tokens from v on
    if len(ref.head.weight) > v:
        more = _normaliser(ref.hidden, ref.head, slice(v, None))
        ref_total = torch.logaddexp(ref_total, more)
        lost = (more - ref_total).exp()
    mass = [x.sub_(y).to(within.dtype) for x, y in zip(log_z, (total, ref_total), strict=True)]  # log P_i, log Q_i
    if direction != "js":
        share = mass[p].exp()  # a tile that a bias forbids as a whole has no mass and an undefined K_i
        value = DIRECTIONS["reverse"](mass[p].t(), mass[q].t()) + torch.where(share > 0, share * within, 0).sum(0)
        if direction == "forward":
            total = total - torch.log1p(-lost)  # its slope is (1 - lost) p - q
        return value.to(within.dtype), (value + lost).to(within.dtype), total, ref_total
    halves = within.new_zeros(2, within.shape[1])  # KL(p || m), KL(q || m)

    def against_the_mean(i: int, rows: slice, z: Tensor, ref_z: Tensor) -> None:
        log_p, log_q = _less(z, total[rows]), _less(ref_z, ref_total[rows])
        halves[0, rows] += _to_mean(log_p, log_q)
        halves[1, rows] += _to_mean(log_q, log_p)

    walk(Products.recall, against_the_mean)
    return halves.mean(0), halves[0] + lost.to(halves.dtype) / 2, total, ref_total


def _check_pair(hidden: Tensor, policy: Head, ref_hidden: Tensor, ref: Head) -> None:
    check_head("the policy's", hidden, policy)
    check_head("the reference's", ref_hidden, ref)
    rows, entries, ref_rows, ref_entries = len(hidden), len(policy.weight), len(ref_hidden), len(ref.weight)
    if rows != ref_rows or entries > ref_entries:
        raise ShapeError(
            "policy and reference differ in rows or vocabulary",
            got=f"policy {rows} x {entries}, ref {ref_rows} x {ref_entries}",
            why="they are compared at the same prefixes, and the KL to a reference that lacks a token is infinite",
            fix="score the same tokens; cut the policy's padded head to the common vocabulary, and sample no more",
        )


def _normaliser(hidden: Tensor, head: Head, part: slice) -> Tensor:
    some = head._replace(weight=head.weight[part], bias=None if head.bias is None else head.bias[part])
    return score(Products(some, hidden, None), hidden.new_empty(len(hidden), 0).long()).normaliser


@torch.no_grad()
def cut_mass(ref_hidden: Float[Tensor, "rows ref_width"], ref: Head, entries: int) -> Float[Tensor, " rows"]:
    """The probability that the reference gives to tokens from `entries` on, which `linear_kl` leaves out; detached."""
    shared, more = (_normaliser(ref_hidden, ref, part) for part in (slice(entries), slice(entries, None)))
    return torch.sigmoid(more - shared).to(upcast(ref_hidden[:0]).dtype)


@opaque
def _head_kl(
    hidden: Tensor, policy: Head, ids: Tensor, anchor: Tensor | tuple[Tensor, Head], *, top_k: int = 0, **options: Any
) -> Tensor:
    """`topk_kl` over the `top_k` likeliest tokens of the policy, or over the ids; the last id is the sampled token."""
    logprobs, _, ids = logprobs_of(hidden, policy, ids, top_k=top_k)
    if not isinstance(anchor, Tensor):
        with torch.no_grad():
            anchor, *_ = logprobs_of(*anchor, ids)
    return topk_kl_of(logprobs, anchor, ids, **options)


def linear_kl(  # noqa: PLR0913  (two models, and what the KL is over)
    policy_hidden: Float[Tensor, "rows width"],
    policy_weight: Float[Tensor, "vocab width"],
    ref_hidden: Float[Tensor, "rows ref_width"],
    ref_weight: Float[Tensor, "ref_vocab ref_width"],
    *,
    direction: Direction = "reverse",
    top_k: int | None = None,
    tail: Tail = "sampled",
    targets: Int[Tensor, " rows"] | None = None,
    log_weight: Float[Tensor, " rows"] | None = None,
    policy_bias: Float[Tensor, " vocab"] | None = None,
    ref_bias: Float[Tensor, " ref_vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Float[Tensor, " rows"]:
    """The KL divergence over the whole vocabulary for each row, in nats, from hidden states, without logits in memory.

    Equation: `exact_kl(policy_logits, ref_logits)`, each logits = softcap tanh(raw / softcap) / temperature with
    raw = hidden @ weight^T + bias as in `linear_logprobs`, summed by tiles i of the vocabulary, with masses P_i, Q_i
    (chain rule; forward with p and q exchanged)::

        KL(p || q) = KL(P || Q) + sum_i P_i KL(p given i || q given i)

    With `top_k`: `topk_kl` of the policy's k likeliest tokens, found in the walk that scores the targets.

    Sampler: none needed for the prefix itself (see `exact_kl`); with `top_k` the targets', see `log_weight`.
    Value: exact up to rounding and >= 0: every term is, so that a small KL does not drown in float32. bfloat16 and
    float16 as in `linear_logprobs`.
    Gradient: exact for the prefix, in the policy's hidden states, weight and bias only; rows without incoming gradient
    are left out. Four to six matrix products in all, for the products of H / 2 rows find room (see the module); `js`,
    which has no chain rule and walks twice, takes up to eight. With `top_k` four in every direction, three where the
    head is frozen; unbiased for every k, and exactly 0 where policy and reference agree.
    Shapes: [N, H], [V, H], [N, H'], [V', H'], biases [V] and [V'], targets [N] -> [N]. V' may exceed V (a
    padded vocabulary): the shared tokens' terms count (see `topk_kl`), nothing is renormalised; see `cut_mass`.

    Args:
        policy_hidden, ref_hidden: last hidden states of both models at the same tokens.
        policy_weight, ref_weight: of their output heads; may be one tensor.
        direction: `reverse` = KL(policy || ref), `forward` = KL(ref || policy), or `js`.
        top_k: tokens in the head, the policy's likeliest; None: the whole vocabulary, and no sample.
        tail: the estimate of the other tokens, see `topk_kl`.
        targets: the sampled tokens; `top_k` needs them.
        log_weight: log(policy / sampler) of the targets; None: 0, on-policy.
        policy_bias, ref_bias: of their output heads. An entry that is set to -inf has probability 0.
        temperature, softcap: both models' logits are divided by it; their bound before that (30 in Gemma 2).

    Raises:
        ShapeError: shapes that do not fit.
        UnknownNameError: an unknown direction.
        TensorError: `top_k` without targets.
        ConfigError: temperature or softcap <= 0, hidden states and weight of two types without autocast, or a `top_k`
            that is no whole number >= 0.

    Source: arXiv:2504.10637 (the estimate), arXiv:2411.09009 (tiles)
    """
    check_name("KL direction", direction, DIRECTIONS)
    policy = Head(policy_weight, policy_bias, temperature, softcap)
    ref = Head(ref_weight, ref_bias, temperature, softcap)
    _check_pair(policy_hidden, policy, ref_hidden, ref)
    if top_k is None:
        detached = (None if x is None else x.detach() for x in (ref_hidden, ref_weight, ref_bias))
        return run_walk(LinearKL, policy, policy_hidden, policy_weight, policy_bias, *detached, direction=direction)
    check_number("top_k", top_k, AT_LEAST_0, whole=True)
    check_tensors(IDS, like=policy_hidden, targets=targets)
    options = {"direction": direction, "tail": tail, "log_weight": log_weight}
    return _head_kl(policy_hidden, policy, cast(Tensor, targets), (ref_hidden, ref), top_k=top_k, **options)


def linear_head_kl(  # noqa: PLR0913  (a model, a server's answer, and what the KL is over)
    policy_hidden: Float[Tensor, "rows width"],
    policy_weight: Float[Tensor, "vocab width"],
    head_ids: Int[Tensor, "rows entries"],
    head_logprobs: Float[Tensor, "rows entries"],
    *,
    top_k: int,
    targets: Int[Tensor, " rows"],
    target_logprobs: Float[Tensor, " rows"],
    kept: Bool[Tensor, "rows entries"] | None = None,
    direction: Direction = "reverse",
    tail: Tail = "sampled",
    log_weight: Float[Tensor, " rows"] | None = None,
    policy_bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Float[Tensor, " rows"]:
    """`topk_kl` over the head of an anchor that a server scored, in nats, the policy scored from hidden states.

    Of the entries (`head_ids`, `head_logprobs`; those that are `kept`) the ones count that `server_head` takes: of
    k + 1 the sampled token is the one too many, and the tail's sample. The anchor's log-probabilities are over its
    whole vocabulary, at the policy's temperature.

    Sampler, Value, Gradient: as in `topk_kl`. Three matrix products, two where the head is frozen.
    Shapes: [N, H], [V, H], [N, K], [N, K], targets and their log-probabilities [N], bias [V] -> [N].

    Raises:
        ShapeError, UnknownNameError, ConfigError: as `linear_logprobs` and `topk_kl`.
    """
    check_tensors(IDS, head_ids=head_ids, targets=targets)
    check_tensors(FLOATS, head_logprobs=head_logprobs, target_logprobs=target_logprobs)
    check_number("top_k", top_k, AT_LEAST_0, whole=True)
    shapes = [tuple(x.shape) for x in (head_ids, head_logprobs, targets, target_logprobs)]
    rows, entries = len(policy_hidden), head_ids.shape[-1:]
    if shapes != [(rows, *entries)] * 2 + [(rows,)] * 2 or head_ids.ndim != 2:
        raise ShapeError(
            "the head and the targets do not fit the hidden states",
            got=f"head_ids and head_logprobs {shapes[:2]}, targets and target_logprobs {shapes[2:]}",
            why="each row of hidden has K entries, an id and a log-probability each, and one sampled token",
            fix=f"pass [{rows}, K] and [{rows}], with kept=False for a missing entry",
        )
    kept = server_head(head_ids, targets, top_k, torch.ones_like(head_ids, dtype=torch.bool) if kept is None else kept)
    ids = torch.cat((torch.where(kept, head_ids, targets[:, None]), targets[:, None]), 1)
    anchor = torch.cat((head_logprobs, target_logprobs[:, None]), 1)
    policy = Head(policy_weight, policy_bias, temperature, softcap)
    options: Any = {"direction": direction, "tail": tail, "log_weight": log_weight, "kept": kept}
    return _head_kl(policy_hidden, policy, ids, anchor, **options)
