"""What klamp's own derivatives can be asked for: the first one, by reverse mode. Anything else is refused in words.

Their backward passes take saved coefficients as numbers. A second derivative through them would lack whatever the
coefficients depend on, without a word; torch.func cannot look into them at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from klamp.errors import ConfigError, TensorError

Backward = Callable[..., Any]


def first_only(backward: Backward) -> Backward:
    """The backward pass of an autograd function that has no second derivative: it refuses to be part of a graph.

    Under torch.compile, which traces backward passes with gradients switched on, nothing is refused.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "klamp's losses have no second derivative",
                got="a backward pass with create_graph=True",
                why="the coefficients of the first one are numbers: what they depend on would be missing in the second",
                fix="leave create_graph out; kl_estimate and exact_kl can be differentiated as often as you like",
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return checked


def applied(function: type[torch.autograd.Function], *given: Any) -> Any:
    """What an autograd function of klamp's returns.

    Raises:
        ConfigError: it was called inside torch.func (grad, vmap, jvp, ...).
        TensorError: an inference tensor would have to be kept for the backward pass.
    """
    try:
        return cast(Any, function).apply(*given)
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
