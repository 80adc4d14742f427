"""The KL over a head of k tokens with a tail: exact where the two models' head is known, sampled where it is not.

At one prefix, p is the policy and q the anchor (a reference, a teacher). The head S holds k tokens that were chosen
without a look at the token y that was sampled there by mu: the policy's likeliest, the anchor's, the union; all fine.
delta = log p - log q, m = (p + q) / 2, w = p / mu. A divergence is a sum over the vocabulary of one function,

    direction   h(p, q) >= 0, 0 only where p = q               p dh/dp
    reverse     p delta - p + q                                p delta
    forward     q (-delta) - q + p                             p - q
    js          (p log(p/m) + q log(q/m)) / 2                  p log(p/m) / 2

since what reverse and forward add to the plain p delta and q (-delta) sums to 0. So its terms over the head and one
weighted term of the sample, if it is outside the head, have the right mean, value and gradient alike::

    value      sum_S h + 1[y not in S] h(p_y, q_y) / mu_y
    gradient   sum_S sg(p dh/dp) grad log p + 1[y not in S] sg((p dh/dp)_y / mu_y) grad log p_y         1/mu = w/p

for every k: 0 is the sampled estimator, the whole vocabulary the exact KL. Where q has mass that mu never samples and
S lacks, the mean is short by what that mass is worth: there it is the generalised KL over head and support.

A constant added to delta in head and tail does not change the mean, as sum_v p_v grad log p_v = 0. With 1, autograd's
of p delta, they cancel on average only: noisier near the anchor than no head at all. With 1 in the head and 0 in the
tail the gradient is off by the gradient of the head's mass. With -log(P/Q), P and Q the masses outside the head (tail
`centered`), the tail's delta is near 0, and so is its noise; at the anchor it is 0.

Source: a head with a sampled tail is EMA-PG's (arXiv:2602.04417), the tail `generalised` equation 5 of MOPD
(arXiv:2606.30406). The constants above are klamp's: value and gradient are right for every k.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.core.arguments import FLOATS, MASKS, check_roles, check_tensors
from klamp.core.estimators import DIRECTIONS, divergence_terms
from klamp.core.gradients import saturated, with_gradient
from klamp.core.masking import masked
from klamp.core.types import Direction
from klamp.errors import ShapeError, check_name

Tail: TypeAlias = Literal["sampled", "bucket", "generalised", "none", "centered"]
TAILS: tuple[str, ...] = get_args(Tail)


def _terms(direction: str, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """h(p, q) and p dh/dp of the table above, for any two positive numbers."""
    p, q = log_p.exp(), log_q.exp()
    empty, none = p == 0, torch.zeros_like(p)  # empty also where p rounds to 0: times an infinite ratio it would be NaN
    delta = torch.where(empty, none, log_p - log_q)
    if direction == "reverse":
        return divergence_terms(log_p, log_q), p * delta
    if direction == "forward":
        slope = torch.where(empty | (delta < -1), p - q, -p * torch.expm1(-delta.clamp(min=-1)))
        return divergence_terms(log_q, log_p), slope
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    value = divergence_terms(log_p, log_m) + divergence_terms(log_q, log_m)
    larger = -torch.log1p(torch.expm1(-delta.abs()) / 2)  # log of the larger of p and q over m; exactly 0 where p = q
    return value / 2, torch.where(empty, none, p * torch.where(delta < 0, larger + delta, larger)) / 2


def _plain(direction: str, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """The terms without what makes them positive, and what autograd makes of their sum over the head."""
    value, slope = _terms(direction, log_p, log_q)
    p, q = log_p.exp(), log_q.exp()
    if direction == "reverse":
        return value + p - q, slope + p
    return (value + q - p, slope - p) if direction == "forward" else (value, slope)


def asked_tokens(targets: Int[Tensor, "*shape"], head: Int[Tensor, "*shape k"]) -> Int[Tensor, "*shape entries"]:
    """The tokens to score at each position: a head's (for -1 the target), and the target. [..., K] -> [..., K + 1]"""
    target = targets.unsqueeze(-1)
    return torch.cat([torch.where(head < 0, target, head), target], -1)


def head_mass(logprobs: Float[Tensor, "*shape k"], kept: Bool[Tensor, "*shape k"]) -> Float[Tensor, "*shape"]:
    """The probability of a head's tokens together; without gradient."""
    return masked(logprobs.detach().exp(), kept).sum(-1)


def _rest(logprobs: Tensor, kept: Tensor) -> Tensor:
    """The logarithm of the mass outside of the head, [..., 1]; below what rounding can tell from 0 it ends there."""
    mass = masked(logprobs.exp(), kept).sum(-1, keepdim=True)
    return (1 - mass).clamp(min=torch.finfo(mass.dtype).eps).log()


def distinct(ids: Int[Tensor, "*shape k"], kept: Bool[Tensor, "*shape k"]) -> Bool[Tensor, "*shape k"]:
    """Which of the kept entries are the first with their token."""
    ordered, order = torch.sort(torch.where(kept, ids, -1), dim=-1, stable=True)
    again = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))[..., : ids.shape[-1]]
    return kept & ~torch.zeros_like(kept).scatter(-1, order, again)


def server_head(
    ids: Int[Tensor, "*shape entries"], targets: Int[Tensor, "*shape"], k: int, kept: Bool[Tensor, "*shape entries"]
) -> Bool[Tensor, "*shape entries"]:
    """Which of the kept entries of a server's answer are its head of k tokens, chosen without a look at the target.

    A server that is asked for its k likeliest tokens adds the sampled one if it is not among them: one entry too many,
    and no part of the head. A token counts once, and no more than k count: k is what the server gives at most.
    """
    first = distinct(ids, kept)
    head = first & ~((first.sum(-1, keepdim=True) > k) & (ids == targets[..., None]))
    return head & (head.cumsum(-1) <= k)


def topk_kl(
    policy_head: Float[Tensor, "*shape k"],
    anchor_head: Float[Tensor, "*shape k"],
    policy_target: Float[Tensor, "*shape"],
    anchor_target: Float[Tensor, "*shape"],
    outside: Bool[Tensor, "*shape"],
    *,
    direction: Direction = "reverse",
    tail: Tail = "sampled",
    log_weight: Float[Tensor, "*shape"] | None = None,
    kept: Bool[Tensor, "*shape k"] | None = None,
) -> Float[Tensor, "*shape"]:
    """The KL at each position from the log-probabilities of a head of k tokens and of the sampled token, in nats.

    Equation: see the top of this module; y the sampled token, w = p / mu. Source: EMA-PG, arXiv:2602.04417.

    Sampler: whoever drew the token, through `log_weight`; the policy itself without. The head must not depend on the
    token: a server that adds it to its k likeliest gives k + 1 entries, see `server_head`.
    Value: unbiased for every k, and >= 0. Infinite where the anchor forbids what the policy allows (forward: the other
    way round), in the head or at the sampled token; a policy that forbids the token that was sampled has no value.
    Gradient: unbiased for every k, in `policy_head` and `policy_target`; exactly 0 where policy and anchor agree, for
    every sample. Where the sampler truncates (top-p, with mu renormalised in w), value and gradient are the
    generalised KL's over head and nucleus, a lower bound. Once differentiable.
    Shapes: [..., K], [..., K], [...] x 3 -> [...]; K may be 0. float16 and bfloat16 are computed in float32.

    Args:
        policy_head, anchor_head: log-probabilities of the head's tokens, normalised over the whole vocabulary; the
            policy's with gradient.
        policy_target, anchor_target: the sampled token's.
        outside: True = the sampled token is not in the head.
        direction: `reverse` = KL(policy || anchor), `forward` = KL(anchor || policy), or `js` as in `exact_kl`.
        tail: `sampled`, as above; `centered`, with the constant -log(P/Q) in the reverse direction. Others follow
            another divergence, and ignore the sampled token: `bucket` one entry for the whole tail, a lower bound, 30
            to 63 % off in gradient unless p / q is constant there; `generalised` the head's terms alone (MOPD,
            arXiv:2606.30406), >= 0 and 0 at the anchor, else 40 to 101 % off; `none` the plain sum over the head of
            p delta (forward q (-delta)), of any sign, 117 to 617 % off, with a gradient that leaves the anchor.
        log_weight: log(policy / sampler) of the sampled token, a number (no gradient); None: 0, on-policy.
        kept: True = the entry counts; False for padding of a short head and for duplicates of a union.

    Raises:
        TensorError: no tensors, numbers or masks of the wrong type, or two devices.
        ShapeError: shapes differ.
        UnknownNameError: an unknown direction or tail.
        ConfigError: policy and anchor swapped (the anchor has a gradient).
    """
    check_name("KL direction", direction, DIRECTIONS)
    check_name("KL tail", tail, TAILS)
    check_tensors(FLOATS, policy_head=policy_head, anchor_head=anchor_head)
    check_tensors(FLOATS, like=policy_head, policy_target=policy_target, anchor_target=anchor_target)
    check_roles(policy_head, anchor_head)
    log_weight = torch.zeros_like(policy_target) if log_weight is None else log_weight
    check_tensors(FLOATS, like=policy_head, log_weight=log_weight)
    kept = torch.ones_like(policy_head, dtype=torch.bool) if kept is None else kept
    check_tensors(MASKS, like=policy_head, outside=outside, kept=kept)
    if policy_head.shape != (*outside.shape, *policy_head.shape[-1:]) or policy_head.ndim == 0:
        raise ShapeError(
            "the head does not fit the positions",
            got=f"policy_head {tuple(policy_head.shape)}, outside {tuple(outside.shape)}",
            why="each position has k tokens in its head, [..., K], and one that was sampled, [...]",
            fix="gather the same tokens from both models; policy_head[..., :0] is a head of none",
        )
    policy, anchor = masked(policy_head, kept), masked(anchor_head.detach(), kept)
    log_p, log_q = policy.detach(), anchor
    constant = _rest(anchor, kept) - _rest(log_p, kept) if tail == "centered" else None
    if tail in ("sampled", "bucket", "centered"):
        if tail == "bucket":
            outside, last, other = torch.ones_like(outside), _rest(policy, kept), _rest(anchor, kept)
            log_w = last.detach()
        else:
            scores = policy_target, anchor_target.detach(), log_weight.detach()
            last, other, log_w = (masked(x, outside)[..., None] for x in scores)
        kept, policy = (torch.cat(pair, -1) for pair in ((kept, outside[..., None]), (policy, last)))
        # Both over the probability of being there, 1 in the head and mu in the tail: w and w q / p.
        log_p, log_q = torch.cat((log_p, log_w), -1), torch.cat((log_q, log_w - (last.detach() - other)), -1)
    value, slope = (_plain if tail == "none" else _terms)(direction, log_p, log_q)
    slope = slope if constant is None or direction != "reverse" else slope + log_p.exp() * constant
    value = torch.where(slope.isfinite(), saturated(value, log_p - log_q), value)
    return with_gradient(masked(value, kept), masked(slope, kept), policy).sum(-1)


def topk_kl_of(
    policy: Float[Tensor, "*shape entries"],
    anchor: Float[Tensor, "*shape entries"],
    ids: Int[Tensor, "*shape entries"],
    *,
    direction: Direction = "reverse",
    tail: Tail = "sampled",
    log_weight: Float[Tensor, "*shape"] | None = None,
    kept: Bool[Tensor, "*shape k"] | None = None,
) -> Float[Tensor, "*shape"]:
    """`topk_kl` of tokens in one row: the head's tokens, and last the sampled one.

    Shapes: [..., K + 1] x 3, kept [..., K] -> [...]; `ids` may be any where `kept` is False.
    """
    same = ids[..., :-1] == ids[..., -1:]
    outside = ~(same if kept is None else same & kept).any(-1)
    head, target = (policy[..., :-1], anchor[..., :-1]), (policy[..., -1], anchor[..., -1])
    return topk_kl(*head, *target, outside, direction=direction, tail=tail, log_weight=log_weight, kept=kept)
