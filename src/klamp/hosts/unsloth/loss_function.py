"""Unsloth's loss function: what takes its place for a loss, and its columns.

Unsloth's loss is linear in the KL of each token. Given a KL whose slope is known and no advantage, Unsloth's function
returns the weights of the tokens: no table of averages here can go out of date.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import UnsupportedVersion
from klamp.hosts.common.coefficient import stopped_calling

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

    tokens: Tensor | None  # [B, W] beta times the penalty in Unsloth's columns, with its gradient; None: nothing
    advantages: Tensor  # [B] advantages, or [B, W] where the KL shifts them
    mean_kl: Tensor  # what Unsloth logs as `kl`: a detached scalar


class LossWithKL:
    """Unsloth's loss with klamp's KL instead of Unsloth's, with Unsloth's weights."""

    def __init__(self, original: Any, adds: Callable[[Call], Added]) -> None:
        self.original, self.adds, self.calls = original, adds, 0

    def apply(self, *args: Any) -> tuple[Any, ...]:
        if len(args) != len(Call._fields):
            raise stopped_calling(f"{len(args)} arguments where {len(Call._fields)} were expected", host="Unsloth")
        self.calls += 1
        call = Call(*args)
        added = self.adds(call)
        loss, length, _, *rest = self.original.apply(*call._replace(beta=0.0, advantages=added.advantages))
        if added.tokens is not None:
            loss = loss + weighed(self.original, call, added.tokens)
        return loss, length, added.mean_kl, *rest


def weighed(original: Any, call: Call, tokens: Tensor) -> Tensor:
    """sum_t w_t tokens_t, w_t the derivative of Unsloth's loss by the KL of token t at coefficient 1; the gradient goes
    through Unsloth's own backward pass, which scales it.
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


LOSS = "UnslothEfficientGRPO"
"""The name of the function that Unsloth's loss calls."""


def loss_function(host: type) -> tuple[dict[str, Any], Any]:
    """Unsloth's loss function, and the namespace in which its compute_loss looks that function up."""
    names = inspect.unwrap(vars(host)["compute_loss"]).__globals__
    function = names.get(LOSS)
    parameters = [] if function is None else list(inspect.signature(function.forward).parameters)[1:]
    words = [name.removeprefix("_").removesuffix("_logps").removesuffix("_per_token") for name in parameters]
    if words != list(Call._fields):
        got = f"{LOSS} takes {', '.join(parameters) or 'nothing: it is not there'}"
        raise stopped_calling(got, host="Unsloth")
    return names, function


@contextmanager
def in_place(host: type, stand_in: Any) -> Iterator[None]:
    """A context in which Unsloth's compute_loss calls `stand_in` instead of its own loss function."""
    names, function = loss_function(host)
    names[LOSS] = stand_in
    try:
        yield
    finally:
        names[LOSS] = function


@dataclass(frozen=True)
class Columns:
    """The column of Unsloth's tensors in which each completion token stands.

    Unsloth moves a text's padding to the right of each row and keeps the last columns: another shift in every row.
    """

    index: Tensor  # the column of each token; 0 if it has none. [B, T]
    present: Tensor  # whether it has one. [B, T] bool
    width: int  # number of Unsloth's columns, W

    @classmethod
    def of(cls, inputs: Mapping[str, Any], width: int, *, pad_id: int) -> Columns:
        """Find the columns for a batch; Unsloth moves tokens by the padding token."""
        completion = inputs["completion_ids"]
        length = completion.shape[1]
        if "max_left_pad" not in inputs:  # nothing was moved: images keep their places
            index = torch.arange(length, device=completion.device).expand_as(completion)
            return cls(index, torch.ones_like(completion, dtype=torch.bool), width)
        prompt = inputs["prompt_ids"]
        is_token = torch.cat([prompt, completion], dim=1) != pad_id
        packed = is_token.cumsum(-1) - 1 - (is_token.shape[1] - width)
        index, present = packed[:, -length:], is_token[:, -length:]
        return cls(torch.where(present, index, 0).clamp(min=0), present & (index >= 0), width)

    def take(self, values: Tensor) -> Tensor:
        """Values in Unsloth's columns [B, W] -> by position in the completion [B, T]; 0 (False) elsewhere."""
        return values.gather(1, self.index).masked_fill(~self.present, 0)

    def put(self, values: Tensor) -> Tensor:
        """Values by position [B, T] -> in Unsloth's columns [B, W]; 0 where no completion token stands."""
        own = values.masked_fill(~self.present, 0)
        return values.new_zeros(len(values), self.width).scatter_add(1, self.index, own)

    def check(self, inputs: Mapping[str, Any], host_ids: Tensor, host_mask: Tensor) -> None:
        """Raise an error if Unsloth trains on other tokens than the ones found here."""
        trained = self.take(host_mask.bool())
        same = (self.take(host_ids) == inputs["completion_ids"]) | ~trained
        if not bool(same.all()) or int(trained.sum()) != int(host_mask.sum()):
            raise UnsupportedVersion(
                "klamp does not find the completions among Unsloth's columns",
                got=f"{int((~same).sum())} other tokens, {int(trained.sum())} of {int(host_mask.sum())} trained tokens",
                why="the KL would be put on other tokens than those it was measured on",
                fix="use a version of Unsloth in klamp's declared range",
            )
