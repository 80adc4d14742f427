"""Unsloth's loss function: what takes its place while a loss is computed, and where its own KL stops pulling.

Unsloth's loss is linear in the KL of each token. How it weighs a token (its mask, its averages, its accumulation, its
loss scaling) is asked of Unsloth itself, call by call: its own function, given a KL whose slope is known and no
advantage, returns nothing but those weights. So there is no table of averages here that could go out of date.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import UnsupportedVersion

APART, SLOPE = math.log(2), 0.5
"""Where the slope of Unsloth's k3 is known exactly, far from its clamps: 1 - exp(-log 2) is 1/2 in every precision."""

BARE = {
    "use_bias_correction_kl": False,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "entropy_mask": None,
    "vllm_importance_sampling_correction": False,
}
"""Options of Unsloth's loss under which its KL is nothing but the weighted sum of k3."""


class Call(NamedTuple):
    """The arguments of Unsloth's loss function, in its order."""

    new: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    lm_head: Any
    input_ids: Tensor
    mask: Tensor
    advantages: Tensor
    beta: float
    scaler: Any
    n_chunks: int
    extra_kwargs: dict[str, Any]
    upstream_scale: float | None


class Added(NamedTuple):
    """What klamp adds to one loss of Unsloth's."""

    tokens: Tensor | None
    """beta times the penalty of each token in Unsloth's columns, with its gradient; None: nothing. [B, W]"""
    advantages: Tensor
    """[B] advantages, or [B, W] where the KL shifts them."""
    mean_kl: Tensor
    """What Unsloth logs as `kl`: a detached scalar."""


class LossWithKL:
    """Unsloth's loss with klamp's KL in the place of its own, weighted as Unsloth weights its own.

    Args:
        original: Unsloth's autograd function.
        adds: what to add, from the arguments of the call.
    """

    def __init__(self, original: Any, adds: Callable[[Call], Added]) -> None:
        self.original, self.adds, self.calls = original, adds, 0

    def apply(self, *args: Any) -> tuple[Any, ...]:
        """The function that Unsloth calls; it returns what Unsloth's own would return."""
        if len(args) != len(Call._fields):
            raise stopped_calling(f"{len(args)} arguments where {len(Call._fields)} were expected")
        self.calls += 1
        call = Call(*args)
        added = self.adds(call)
        loss, length, _, *rest = self.original.apply(*call._replace(beta=0.0, advantages=added.advantages))
        if added.tokens is not None:
            loss = loss + weighed(self.original, call, added.tokens)
        return loss, length, added.mean_kl, *rest

    def check_called_once(self) -> None:
        """Raise an error if Unsloth did not call the loss exactly once.

        Raises:
            UnsupportedVersion: it did not: the KL would be missing from the loss, or count twice.
        """
        if self.calls != 1:
            raise stopped_calling(f"{self.calls} calls in one loss, where there should be 1")


def weighed(original: Any, call: Call, tokens: Tensor) -> Tensor:
    """The sum of per-token values, weighted as Unsloth's loss weights them: a scalar with gradient.

    Equation: sum_t w_t tokens_t, with w_t the derivative of Unsloth's loss by the KL of token t at coefficient 1.
    Gradient: w_t to each value, through Unsloth's own backward pass, which has its own way with loss scaling and
    gradient accumulation.
    """
    with torch.enable_grad():
        probe = torch.zeros_like(tokens, dtype=torch.float32).requires_grad_()
        response = _response(original, call._replace(scaler=None, upstream_scale=None), probe)
        (slopes,) = torch.autograd.grad(response, probe)
    value = (slopes / SLOPE * tokens.detach()).sum()
    if not tokens.requires_grad:
        return value
    carrier = _response(original, call, (tokens - tokens.detach()) / SLOPE)
    return carrier - carrier.detach() + value


def _response(original: Any, call: Call, x: Tensor) -> Tensor:
    """The loss that Unsloth computes for a known KL of coefficient 1: from it follows each token's weight."""
    bare = call._replace(
        new=x,
        old=None,
        ref=x.detach() - APART,
        sampling=None,
        advantages=torch.zeros_like(call.advantages),
        beta=1.0,
        extra_kwargs={**call.extra_kwargs, **BARE},
    )
    return original.apply(*bare)[0]


def stopped_calling(got: str) -> UnsupportedVersion:
    """The error for a version of Unsloth that does not call the loss where klamp replaces it."""
    return UnsupportedVersion(
        "Unsloth's loss does not take the KL where klamp puts it",
        got=got,
        why="klamp's KL enters through the function that Unsloth's compute_loss calls; without it the run would train "
        "without the KL that was asked for",
        fix="use a version of Unsloth in klamp's declared range, and no subclass that computes the loss elsewhere",
    )


LOSS = "UnslothEfficientGRPO"
"""The name of the function that Unsloth's loss calls."""

FARTHEST, STEP = 40.0, 1e-3
"""How far out, and how finely, Unsloth's clamps are looked for, in nats."""


class Clamps(NamedTuple):
    """The log-ratios (policy - ref, nats) beyond which Unsloth's own KL has no gradient; None: it always has one."""

    below: float | None
    above: float | None
    value: float
    """The largest value of the KL of one token, in nats."""


def loss_function(host: type) -> tuple[dict[str, Any], Any]:
    """Unsloth's loss function, and the namespace in which its compute_loss looks that function up.

    Raises:
        UnsupportedVersion: it is not there, or takes other arguments.
    """
    names = inspect.unwrap(vars(host)["compute_loss"]).__globals__
    function = names.get(LOSS)
    taken = [] if function is None else list(inspect.signature(function.forward).parameters)[1:]
    if [name.removeprefix("_").removesuffix("_logps").removesuffix("_per_token") for name in taken] != list(
        Call._fields
    ):
        raise stopped_calling(f"{LOSS} takes {', '.join(taken) or 'nothing: it is not there'}")
    return names, function


@contextmanager
def in_place(host: type, stand_in: LossWithKL) -> Iterator[None]:
    """A context in which Unsloth's compute_loss calls `stand_in` instead of its own loss function."""
    names, function = loss_function(host)
    names[LOSS] = stand_in
    try:
        yield
    finally:
        names[LOSS] = function


def silent_clamps(original: Any) -> Clamps:
    """Measure where the gradient of Unsloth's own KL ends, and the largest value that it takes."""
    count = round(2 * FARTHEST / STEP)
    with torch.enable_grad():
        apart = torch.linspace(-FARTHEST, FARTHEST, count + 1).view(1, -1).requires_grad_()
        loss = _own_kl(original, apart)
        (slope,) = torch.autograd.grad(loss, apart)
    dead = apart.detach()[(slope == 0) & (apart.abs() > 0.1)]
    below, above = dead[dead < 0], dead[dead > 0]
    return Clamps(
        below=float(below.max()) if len(below) else None,
        above=float(above.min()) if len(above) else None,
        value=float(_own_kl(original, torch.tensor([[-FARTHEST]]))),
    )


def _own_kl(original: Any, apart: torch.Tensor) -> torch.Tensor:
    """Unsloth's own KL, summed over tokens that are so many nats from the reference."""
    call = Call(
        new=apart,
        old=None,
        ref=torch.zeros_like(apart),
        sampling=None,
        lm_head=None,
        input_ids=torch.zeros_like(apart, dtype=torch.long),
        mask=torch.ones_like(apart),
        advantages=torch.zeros(1),
        beta=1.0,
        scaler=None,
        n_chunks=1,
        extra_kwargs={"loss_type": "dr_grpo", "max_completion_length": 1},
        upstream_scale=None,
    )
    return original.apply(*call)[0]
