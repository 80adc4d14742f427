"""Log-probabilities and the exact KL straight from hidden states, without the [N, V] matrix of logits.

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

On a CUDA device `linear_logprobs` in up to 32 bits runs through the Triton kernels of `_linear_triton` where Triton is
installed (four products, nothing kept), which have been tested through the interpreter only; `KLAMP_TRITON=0` in the
environment switches them off. `linear_kl` uses the tiles everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.core._derivatives import applied
from klamp.core._linear_autograd import LinearLogprobs
from klamp.core._linear_kept import owner_of
from klamp.core._linear_kl import LinearKL
from klamp.core.arguments import FLOATS, IDS, POSITIVE, check_flag, check_number, check_tensors, check_values_exist
from klamp.core.estimators import DIRECTIONS
from klamp.core.types import Direction
from klamp.errors import ConfigError, ShapeError, check_name

Result = TypeVar("Result")


def _opaque(function: Callable[..., Result], *given: Any) -> Result:
    """Calls the function outside of torch.compile's graph, since which rows count depends on the data."""
    if torch.compiler.is_compiling():
        return cast(Any, torch.compiler).disable(function)(*given)
    return function(*given)


def _check_head(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    check_tensors(FLOATS, **{f"{name} hidden states": hidden, f"{name} head's weight": weight})
    check_values_exist(f"{name} hidden states", hidden)
    if bias is not None:
        check_tensors(FLOATS, like=hidden, **{f"{name} head's bias": bias})
    fits = hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        with_bias = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ShapeError(
            f"{name} hidden states and head do not fit together",
            got=f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}{with_bias}",
            why="the logits are hidden [N, H] times weight [V, H] transposed, plus bias [V]",
            fix="flatten the hidden states to [N, H] and pass lm_head.weight as it is",
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ConfigError(
            f"{name} hidden states and weight differ in type",
            got=f"hidden {hidden.dtype}, weight {weight.dtype}",
            why="a linear layer refuses it too: one of them would have to be copied",
            fix="cast one of them, or call under torch.autocast",
        )


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


def _check_scale(temperature: float, softcap: float | None) -> None:
    divides = POSITIVE.but("the logits are divided by it", "use that of the sampler or of the model's configuration")
    check_number("temperature", temperature, divides)
    check_number("softcap", softcap, divides, optional=True)


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the type that autocast would give the inputs of a linear layer; unchanged without autocast."""
    kind = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    _check_head("the", hidden, weight, bias)
    _check_targets(hidden, weight, targets)
    _check_scale(temperature, softcap)
    options = ((temperature, softcap), owner_of(weight), torch.is_grad_enabled(), entropy)
    given = _cast(hidden, weight, bias)
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
@overload
def linear_logprobs(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " rows"],
    *,
    bias: Float[Tensor, " vocab"] | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    return_entropy: bool,
) -> Float[Tensor, " rows"] | tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]: ...
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
    found = _opaque(_logprobs, hidden, weight, bias, targets, temperature, softcap, return_entropy)
    return cast(tuple[Tensor, Tensor], found) if return_entropy else found[0]


def _kl(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    ref_hidden: Tensor,
    ref_head: tuple[Tensor, Tensor | None],
    scale: tuple[float, float | None],
    direction: Direction,
) -> Tensor:
    check_name("KL direction", direction, DIRECTIONS)
    _check_head("the policy's", hidden, *head)
    _check_head("the reference's", ref_hidden, *ref_head)
    _check_scale(*scale)
    rows, entries, ref_rows, ref_entries = hidden.shape[0], head[0].shape[0], ref_hidden.shape[0], ref_head[0].shape[0]
    if rows != ref_rows or entries != ref_entries:
        raise ShapeError(
            "policy and reference differ in rows or vocabulary",
            got=f"policy {rows} x {entries}, ref {ref_rows} x {ref_entries}",
            why="the sum runs over one common vocabulary at the same prefixes",
            fix="score the same tokens; cut a padded head to the common vocabulary",
        )
    given = _cast(hidden, *head, *(None if x is None else x.detach() for x in (ref_hidden, *ref_head)))
    options = (scale, owner_of(head[0]), torch.is_grad_enabled(), direction)
    with torch.autocast(hidden.device.type, enabled=False):
        return applied(LinearKL, *given, *options)


def linear_kl(
    policy_hidden: Float[Tensor, "rows width"],
    policy_weight: Float[Tensor, "vocab width"],
    ref_hidden: Float[Tensor, "rows ref_width"],
    ref_weight: Float[Tensor, "vocab ref_width"],
    *,
    direction: Direction = "reverse",
    policy_bias: Float[Tensor, " vocab"] | None = None,
    ref_bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Float[Tensor, " rows"]:
    """The KL divergence over the whole vocabulary for each row, in nats, from hidden states, without logits in memory.

    Equation: `exact_kl(policy_logits, ref_logits)`, each logits = softcap tanh(raw / softcap) / temperature with
    raw = hidden @ weight^T + bias as in `linear_logprobs`, summed by tiles i of the vocabulary, with masses P_i, Q_i
    (chain rule; forward with p and q exchanged)::

        KL(p || q) = KL(P || Q) + sum_i P_i KL(p given i || q given i)

    Sampler: none needed for the prefix itself (see `exact_kl`).
    Value: exact up to rounding and >= 0: every term is, so that a small KL does not drown in float32. bfloat16 and
    float16 as in `linear_logprobs`.
    Gradient: exact for the prefix, in the policy's hidden states, weight and bias only; rows without incoming gradient
    are left out. Four to six matrix products in all, for the products of H / 2 rows find room (see the module); `js`,
    which has no chain rule and walks twice, takes up to eight.
    Shapes: [N, H], [V, H], [N, H'], [V, H'], biases [V] -> [N].

    Args:
        policy_hidden: last hidden states of the policy.
        policy_weight: of its output head.
        ref_hidden: last hidden states of the reference at the same tokens.
        ref_weight: of its output head; may be the same tensor as the policy's.
        direction: `reverse` = KL(policy || ref), `forward` = KL(ref || policy), or `js`.
        policy_bias: of the policy's output head. An entry that it sets to -inf has probability 0.
        ref_bias: of the reference's output head.
        temperature: both models' logits are divided by it.
        softcap: bound on both models' logits before the temperature (30 in Gemma 2).

    Raises:
        ShapeError: shapes that do not fit.
        UnknownNameError: an unknown direction.
        ConfigError: temperature or softcap <= 0, or hidden states and weight of two types without autocast.

    Source: arXiv:2504.10637 (the estimate), arXiv:2411.09009 (tiles)
    """
    policy_head, ref_head = (policy_weight, policy_bias), (ref_weight, ref_bias)
    return _opaque(_kl, policy_hidden, policy_head, ref_hidden, ref_head, (temperature, softcap), direction)
