"""The KL penalty of each token, whose value and gradient are two separate choices.

Notation: delta = log policy - log ref, u = exp(-delta), w = policy / behavior (1 on-policy), rho_t = product of w up to
t, sg = stop-gradient. The gradient is built from its coefficient, sg(c_t) * grad log policy_t, never by
differentiating w * k3: that loses its gradient to cancellation (float32 from about 17 nats, bfloat16 from 8).

    horizon    gradient    c_t                                          expected gradient of the sum over tokens
    token      reverse     w_t delta_t                                  KL(policy || ref) at each sampled prefix
    token      forward     w_t (1 - u_t)                                KL(ref || policy) at each sampled prefix
    token      own         w_t d value / d delta                        the estimator's own
    sequence   reverse     rho_t delta_t + sum_{j > t} rho_j f_j        KL(policy || ref) over sequences, exactly
    sequence   forward     rho_t - prod_{j <= t} ref_j / behavior_j     KL(ref || policy) over sequences, exactly

f is the estimator of later KL: k3 where that is the value, k1 otherwise. Tokens that are left out of the KL (`kl_mask`)
have delta_t = f_t = 0, and then f is k3 always: the KL of a position is the generalised one over the kept tokens v,

    D = sum_v (policy_v delta_v - policy_v + ref_v) >= 0, 0 only where the two agree on all of them: the mean of k3,

whose gradient is the mean of delta grad log policy, as in the table. The mean of k1 over the kept tokens is no such
divergence: it lacks their mass, ref - policy, and is lowered by moving it.

The backward passes take saved coefficients as numbers: a second derivative would lack what these depend on, and
torch.func cannot look into them. Both are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast, get_args

import torch
from torch import Tensor

from klamp.core.arguments import FLOATS, MASKS, POSITIVE, check_number, check_roles, check_tensors
from klamp.core.estimators import ESTIMATORS, TokenFunction, check_estimator
from klamp.core.masking import bounded, future_sum, masked, masked_log_ratio
from klamp.core.types import Estimator, Gradient, Horizon, LogProbs, Mask, TokenValues, Value, refuse_positive
from klamp.errors import ConfigError, ShapeError, TensorError, check_name

# Past this log-ratio exp(-delta) - 1 has lost nothing to the 1, and w * exp(-delta) must be one exponential: the
# factors over- and underflow where their product is harmless.
_FAR = -1.0

BOUND = POSITIVE.but("it bounds a magnitude", "use None for no bound")
"""What bounds a weight or a log-ratio; None is no bound."""


def first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an autograd function that has no second derivative: it refuses to be part of a graph."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which traces it with gradients on
            raise ConfigError(
                "klamp's losses have no second derivative",
                got="a backward pass with create_graph=True",
                why="the coefficients of the first one are numbers: what they depend on would be missing in the second",
                fix="leave create_graph out; kl_estimate and exact_kl can be differentiated as often as you like",
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return checked


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """What an autograd function of klamp's returns; torch.func and inference tensors are refused."""
    try:
        return cast(Any, function).apply(*inputs)
    except RuntimeError as error:
        if "functorch" in str(error):
            raise ConfigError(
                "klamp's losses cannot be taken apart by torch.func",
                got="a call inside torch.func.grad, vmap, jvp or another transform",
                why="their gradient is chosen apart from their value, which a transform cannot see",
                fix="use loss.backward() or torch.autograd.grad; kl_estimate and exact_kl are plain torch",
            ) from error
        if "Inference tensors" in str(error):
            raise TensorError(
                "a tensor that was made under torch.inference_mode is needed for the backward pass",
                got="hidden states or weights that are inference tensors",
                why="torch saves none of them",
                fix="compute them under torch.no_grad(), or pass a clone()",
            ) from error
        raise


class _WithGradient(torch.autograd.Function):
    """A value in the forward pass and coefficient * grad policy_logprobs in the backward pass, kept apart."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, coefficient: Tensor, policy_logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(coefficient)
        return value.clone()

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (coefficient,) = ctx.saved_tensors
        # A token that the loss leaves out gets 0, also where its coefficient overflowed.
        return None, None, torch.where(grads[0] == 0, torch.zeros_like(coefficient), coefficient * grads[0])


def with_gradient(value: Tensor, coefficient: Tensor, policy_logprobs: Tensor) -> Tensor:
    """sg(value) + sg(coefficient) (log policy - sg(log policy)): a value with another gradient."""
    return cast(Tensor, applied(_WithGradient, value.detach(), coefficient.detach(), policy_logprobs))


def log_weights(
    policy_logprobs: LogProbs,
    behavior_logprobs: LogProbs | None,
    mask: Mask,
    *,
    horizon: Horizon,
    max_weight: float | None = None,
) -> TokenValues:
    """The logarithm of each token's off-policy weight, policy / sampler, detached, in nats; 0 without a sampler.

    Equation: `token` log w_t = log policy_t - log behavior_t; `sequence` the sum over j <= t: the ratio of the whole
    prefix, which makes an off-policy sum over tokens exact. `max_weight` truncates the weight (biased).
    """
    if behavior_logprobs is None:
        return torch.zeros_like(masked(policy_logprobs.detach(), mask))
    log_w = masked_log_ratio(policy_logprobs, behavior_logprobs, mask)
    if horizon == "sequence":
        log_w = log_w.cumsum(-1)
    return log_w if max_weight is None else log_w.clamp(max=math.log(max_weight))


def _weigh(log_w: Tensor, x: Tensor) -> Tensor:
    """w x; infinite or 0 where x is, also where w = exp(log_w) leaves its type and reads 0 or inf: 0 * inf is NaN."""
    return torch.where(x.isinf() | (x == 0), x, log_w.exp() * x)


def _weigh_k3(function: TokenFunction, log_w: Tensor, delta: Tensor, sign: float, rest: Tensor | float) -> Tensor:
    """w function(delta), which is w (sign exp(-delta) + rest), without overflow in the factors."""
    near = delta > _FAR
    safe = torch.where(near, delta, torch.zeros_like(delta))
    large = sign * (log_w - delta).exp()
    far = torch.where(large.isinf(), large, large + log_w.exp() * rest)  # a quarter of `large` at least
    return torch.where(near, _weigh(log_w, function(safe)), far)


def weighted_value(value: Estimator, log_w: Tensor, delta: Tensor) -> Tensor:
    """The off-policy weight times the estimator, in nats, without overflow in the factors: w value(delta)."""
    function = ESTIMATORS[value].value
    return _weigh_k3(function, log_w, delta, 1.0, delta - 1) if value == "k3" else _weigh(log_w, function(delta))


def _weighted_slope(value: Estimator, log_w: Tensor, delta: Tensor) -> Tensor:
    """The same of the estimator's derivative; of k3 w (1 - u), the coefficient of the forward KL."""
    slope = ESTIMATORS[value].derivative
    return _weigh_k3(slope, log_w, delta, -1.0, 1.0) if value == "k3" else _weigh(log_w, slope(delta))


def _sequence_reverse(value: Estimator, log_w: Tensor, delta: Tensor) -> Tensor:
    # The KL of later tokens needs an unbiased value: k3 where it is asked for (less noise), k1 otherwise.
    unbiased: Estimator = "k3" if value == "k3" else "k1"
    return _weigh(log_w, delta) + future_sum(weighted_value(unbiased, log_w, delta))


COEFFICIENTS: dict[tuple[str, str], Callable[[Estimator, Tensor, Tensor], Tensor]] = {
    ("token", "reverse"): lambda value, log_w, delta: _weigh(log_w, delta),
    ("token", "forward"): lambda value, log_w, delta: _weighted_slope("k3", log_w, delta),
    ("token", "own"): _weighted_slope,
    ("token", "none"): lambda value, log_w, delta: torch.zeros_like(delta),
    ("sequence", "reverse"): _sequence_reverse,
    ("sequence", "forward"): lambda value, log_w, delta: _weighted_slope("k3", log_w, delta.cumsum(-1)),
    ("sequence", "none"): lambda value, log_w, delta: torch.zeros_like(delta),
}
"""(horizon, gradient) -> c_t from the estimator, log w and delta: the table at the top of this module."""


def saturation(dtype: torch.dtype) -> float:
    """The largest value of a token in a loss, in nats, so that sums stay finite; k3 reaches it at 70 nats (float32)."""
    return torch.finfo(dtype).max * 1e-8


def saturated(value: Tensor, delta: Tensor) -> Tensor:
    """The values, none above `saturation`; an infinite or NaN log-ratio keeps its value."""
    return torch.where(delta.isfinite(), value.clamp(max=saturation(value.dtype)), value)


def check_gradient_choice(value: str, gradient: str, horizon: str) -> None:
    """Refuse unknown names of estimators, gradients and horizons, and gradients without a sequence horizon."""
    check_name("KL estimator", value, get_args(Value))
    check_name("KL gradient", gradient, get_args(Gradient))
    check_name("KL horizon", horizon, get_args(Horizon))
    if (horizon, gradient) == ("sequence", "own"):
        raise ConfigError(
            "gradient 'own' has no sequence horizon",
            got=f"gradient='own', horizon='sequence', value={value!r}",
            why="an estimator's own gradient is one token's; the future terms belong to a divergence",
            fix="use gradient='reverse' or 'forward' with horizon='sequence', or horizon='token'",
        )
    if (value, gradient, horizon) == ("exact", "forward", "sequence"):
        raise ConfigError(
            "the exact forward KL has no sequence horizon",
            got="gradient='forward', horizon='sequence', value='exact'",
            why="its prefixes would have to be sampled from the reference",
            fix="use kl_estimator='k3' with kl_gradient='forward'",
        )


def penalty_from_weights(
    policy_logprobs: LogProbs,
    delta: TokenValues,
    log_w: TokenValues,
    mask: Mask,
    *,
    value: Estimator,
    gradient: Gradient,
    horizon: Horizon,
    kl_mask: Mask | None = None,
) -> TokenValues:
    """The penalty of `kl_penalty` for a log-ratio and log-weight that were computed (and detached) before.

    `kl_mask` marks the tokens that carry the KL; `delta` and the value of the others are 0. With horizon `sequence`
    they keep the gradient of the generalised KL (top of this module), for which k3 alone is unbiased.
    """
    if kl_mask is not None and (horizon, gradient) == ("sequence", "forward"):
        raise ConfigError(
            "the forward KL over sequences cannot leave tokens out",
            got="gradient='forward', horizon='sequence', and a kl_mask",
            why="its weight is the reference's probability of the whole prefix",
            fix="use horizon='token', gradient='reverse', or no exclusions",
        )
    carried = mask if kl_mask is None else kl_mask
    later: Estimator = "k3" if kl_mask is not None and horizon == "sequence" else value
    pulled = mask if horizon == "sequence" else carried
    coefficient = masked(COEFFICIENTS[horizon, gradient](later, log_w, delta), pulled)
    weighted = masked(weighted_value(value, log_w, delta), carried)
    finite = coefficient.isfinite().all(-1, keepdim=True)
    weighted = torch.where(finite, saturated(weighted, delta), weighted)
    return with_gradient(weighted, coefficient, policy_logprobs)


def kl_penalty(
    policy_logprobs: LogProbs,
    ref_logprobs: LogProbs,
    mask: Mask,
    *,
    value: Estimator = "k3",
    gradient: Gradient = "reverse",
    horizon: Horizon = "token",
    behavior_logprobs: LogProbs | None = None,
    max_weight: float | None = None,
    max_log_ratio: float | None = None,
) -> TokenValues:
    """The KL penalty of each token in nats, its value and its gradient chosen separately.

    Equation: see the table at the top of this module; forward value sg(w_t) * estimator_t.

    Sampler: the policy; with `behavior_logprobs` whoever those belong to, through the token ratio (horizon `token`)
    or the ratio of the whole prefix (horizon `sequence`).
    Value: the named estimator (times the off-policy weight), 0 where masked. In a sequence whose gradient is finite it
    ends at 3e30 (float32; k3 passes that at 70 nats), so that the loss is finite too.
    Gradient: summed over tokens and averaged over samples, `reverse` is the gradient of KL(policy || ref), `forward`
    of KL(ref || policy), `own` of the estimator taken as a loss (k1: zero; k2: reverse; k3: forward), `none`
    zero. Once differentiable; create_graph and torch.func are refused. Horizon `token` holds the sampled prefixes
    fixed, `sequence` adds what each token does to the KL of later ones. The token ratio alone is not unbiased for
    off-policy sequences; the prefix ratio is.
    Shapes: all [B, T] -> [B, T]. float16 and bfloat16 are computed in float32.

    Args:
        policy_logprobs, ref_logprobs: log-probabilities of the sampled tokens, the policy's with gradient.
        mask: True = a token that counts.
        value, gradient, horizon: the estimator of the forward value, and the row of the table.
        behavior_logprobs: log-probabilities under whoever sampled; None means the policy itself.
        max_weight: truncate the off-policy weight there (biased; off by default).
        max_log_ratio: bound the log-ratio there, straight-through (off by default).

    Raises:
        TensorError: no tensors, no floating-point numbers, a mask that is not boolean, or two devices.
        ShapeError: shapes differ, or no dimension of tokens.
        DataError: log-probabilities above 0.
        UnknownNameError: an unknown value, gradient or horizon.
        ConfigError: gradient `own` with horizon `sequence`, a bound that is not positive, or policy and reference
            swapped (the reference has the gradient).

    Source: DeepSeek-V3.2 arXiv:2512.02556 and RPG arXiv:2505.17508 (token, reverse), FRPO arXiv:2601.10201 (sequence,
    reverse), DeepSeekMath arXiv:2402.03300 (k3 own).
    """
    check_estimator(value, function="kl_penalty")
    check_gradient_choice(value, gradient, horizon)
    check_number("max_weight", max_weight, BOUND, optional=True)
    check_number("max_log_ratio", max_log_ratio, BOUND, optional=True)
    check_tensors(FLOATS, policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    check_roles(policy_logprobs, ref_logprobs)
    check_tensors(MASKS, like=policy_logprobs, mask=mask)
    if behavior_logprobs is not None:
        check_tensors(FLOATS, like=policy_logprobs, behavior_logprobs=behavior_logprobs)
    if policy_logprobs.ndim == 0:
        raise ShapeError(
            "policy_logprobs has no dimension of tokens",
            got="a single number",
            why="a token's penalty can depend on the tokens before and after it",
            fix="pass [B, T], also for one token",
        )
    delta = bounded(masked_log_ratio(policy_logprobs, ref_logprobs, mask), max_log_ratio)
    log_w = log_weights(policy_logprobs, behavior_logprobs, mask, horizon=horizon, max_weight=max_weight)
    choices: Any = {"value": value, "gradient": gradient, "horizon": horizon}
    penalty = penalty_from_weights(policy_logprobs, delta, log_w, mask, **choices)
    refuse_positive(mask, policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    return penalty


def exact_penalty(
    policy_logprobs: LogProbs,
    exact: TokenValues,
    log_w: TokenValues,
    mask: Mask,
    surrogate: TokenValues | None = None,
    *,
    gradient: Gradient,
    horizon: Horizon,
    kl_mask: Mask | None = None,
) -> TokenValues:
    """The penalty whose value is the exact KL over the vocabulary at each sampled position, in nats. [B, T]

    Equation: gradient of term t = w_t grad exact_t, plus, with horizon `sequence`, sg(sum_{j > t} rho_j exact_j)
    grad log policy_t: the Rao-Blackwellised gradient of the KL over sequences.

    Value: w_t * exact_t. Position t has the weight of the prefix *before* t, since the vocabulary at t is summed
    over, not sampled: the inclusive weights `log_w` are shifted by one.
    Gradient: `reverse` and `own` differentiate `exact`; `forward` differentiates `surrogate`, the exact forward KL.
    `kl_mask` marks the positions that carry the KL; with horizon `sequence` the others keep the gradient of later ones.

    Source: arXiv:2504.10637
    """
    before = torch.nn.functional.pad(log_w[..., :-1], (1, 0)).exp()
    carried = mask if kl_mask is None else kl_mask
    value = masked(exact.detach(), carried) * before
    if gradient == "none":
        return value
    if gradient == "forward" and surrogate is None:
        raise ConfigError(
            "the exact forward gradient needs the exact forward KL",
            fix="pass exact_kl(policy_logits, ref_logits, direction='forward') as the surrogate",
        )
    source = masked(exact if gradient != "forward" or surrogate is None else surrogate, carried)
    penalty = value + before * (source - source.detach())
    if horizon == "sequence":
        penalty = penalty + with_gradient(torch.zeros_like(value), future_sum(value), policy_logprobs)
    return masked(penalty, mask)
