"""Losses that a client traced with torch.fx and uploaded to the stand-in (`create_custom_loss`, SDK 0.36+, alpha).

Such a loss is a list of operations on one datum's tensors. Only the operations named here are carried out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp_standin.protocol import Refused, TrainingRequest

_NAMES = (
    "abs add amax amin cat ceil clamp clamp_max clamp_min clip cos cumsum detach div double eq exp expand_as expm1 "
    "flip float floor full_like gather ge gt isfinite isinf isnan le log log1p logical_and logical_not logical_or "
    "logsumexp lt masked_fill max maximum mean min minimum mul nan_to_num ne neg new_tensor new_zeros numel ones_like "
    "pow prod reciprocal relu reshape rsqrt sigmoid sign sin softplus sqrt square squeeze stack sub sum tanh tensor to "
    "triu unsqueeze view where zeros_like logsigmoid size type_as bool any all shape ndim dtype device"
)
FUNCTIONS = frozenset(_NAMES.split())
"""Functions of torch and torch.nn.functional, methods and attributes of tensors."""
_MODULES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "operator": operator, "math": math}


@dataclass(frozen=True, kw_only=True)
class CustomLoss:
    """A loss that a client uploaded."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    """The `loss_fn_inputs` it reads and the rank of each, after `logprobs`."""
    nodes: Sequence[Mapping[str, Any]]

    def __call__(self, logprobs: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one datum, and its metrics."""
        values: dict[str, Any] = {}
        arguments = iter([logprobs, *(given[name] for name, _ in self.inputs)])
        for node in self.nodes:
            args = [_decoded(x, values) for x in node.get("args", [])]
            kwargs = {k: _decoded(x, values) for k, x in node.get("kwargs", {}).items()}
            if node["op"] == "output":
                loss, metrics = args[0]
                return loss, dict(metrics)
            values[node["name"]] = next(arguments) if node["op"] == "placeholder" else _operation(node)(*args, **kwargs)
        raise Refused(f"the loss {self.name!r} returns nothing")

    def check(self, request: TrainingRequest) -> None:
        """Refuse data that lack what the loss reads, or have it with another number of dimensions."""
        for i, inputs in enumerate(request.inputs):
            for name, rank in (("target_tokens", 1), *self.inputs):
                if name not in inputs or inputs[name].ndim != rank:
                    raise Refused(
                        f"data[{i}].loss_fn_inputs[{name!r}] of rank {rank} is missing; {self.name!r} reads it"
                    )

    def summed(
        self, logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of the loss over all datums, and the metrics, joined as their names say."""
        found = [self(x, y) for x, y in zip(logprobs, inputs, strict=True)]
        metrics: dict[str, float] = {}
        for _, seen in found:
            for name, value in seen.items():
                share = 1.0 / len(found) if name.endswith(":mean") else 1.0
                metrics[name] = metrics.get(name, 0.0) + share * float(torch.as_tensor(value).detach())
        return torch.stack([loss for loss, _ in found]).sum(), metrics


def _operation(node: Mapping[str, Any]) -> Callable[..., Any]:
    target: str = node["target"]
    module, _, name = target.rpartition(".")
    if node["op"] == "call_method" and target in FUNCTIONS:
        return lambda tensor, *args, **kwargs: getattr(tensor, target)(*args, **kwargs)
    if node["op"] == "call_function" and target in ("getattr", "builtins.getattr"):
        return _attribute
    known = name in FUNCTIONS or module in ("math", "operator")
    if node["op"] == "call_function" and module in _MODULES and known and not name.startswith("_"):
        return getattr(_MODULES[module], name)
    raise Refused(f"a custom loss may not use {node['op']} {target!r}")


def _attribute(tensor: Any, name: str) -> Any:
    if name not in FUNCTIONS:
        raise Refused(f"a custom loss may not read the attribute {name!r}")
    return getattr(tensor, name)


def _decoded(value: Any, values: Mapping[str, Any]) -> Any:
    """An argument of an operation, from its form in JSON."""
    if isinstance(value, list):
        return [_decoded(x, values) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    simple: dict[str, Callable[[Any], Any]] = {
        "ref": lambda x: values[x],
        "tuple": lambda x: tuple(_decoded(y, values) for y in x),
        "dict": lambda x: {k: _decoded(y, values) for k, y in x.items()},
        "slice": lambda x: slice(*(_decoded(y, values) for y in x)),
        "ellipsis": lambda x: ...,
        "float": float,
        "dtype": lambda x: getattr(torch, x),
        "device": torch.device,
    }
    if kind not in simple:
        raise Refused(f"a custom loss may not pass {kind!r}")
    return simple[kind](content)


def read_custom_loss(body: Mapping[str, Any]) -> CustomLoss:
    """Read an uploaded loss; one with an unknown operation is refused."""
    inputs = tuple((x["name"], x["rank"]) for x in body["inputs"])
    nodes = body["graph"]["nodes"]
    for node in nodes:
        if node["op"] not in ("placeholder", "output"):
            _operation(node)
    return CustomLoss(name=body["name"], inputs=inputs[1:], nodes=nodes)
