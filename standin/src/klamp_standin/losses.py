"""The built-in losses of the stand-in: sums over all tokens of all datums, with strict checks of the data.

    cross_entropy         -sum(weights * logprobs); of N tokens, or of K candidates for each of them (all in [N, K])
    importance_sampling   -sum(ratio * advantages),                              ratio = exp(logprobs - old logprobs)
    ppo                   -sum(min(ratio * advantages, clip(ratio) * advantages)),   clip to [low, high], 0.8 and 1.2

Source: https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from klamp_standin.protocol import Refused, TrainingRequest

_RL = ("target_tokens", "logprobs", "advantages")
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _RL,
    "ppo": _RL,
}
"""Loss -> the keys that every datum holds: target_tokens in int64, all else in float32."""
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""The settings of ppo: the lowest and highest ratio."""


def check(request: TrainingRequest, vocabulary: int, longest: int | None) -> None:
    """Refuse a request whose data do not fit its loss.

    Raises:
        Refused: an unknown loss or setting; a datum with a missing or extra key, another dtype or length, a token
            outside the vocabulary, or more tokens than the model takes.
    """
    if request.loss_fn not in INPUTS:
        raise Refused(f"unknown loss_fn {request.loss_fn!r}; the stand-in has {', '.join(INPUTS)}")
    _check_settings(request)
    if not request.tokens:
        raise Refused("data is empty")
    for i, (tokens, inputs) in enumerate(zip(request.tokens, request.inputs, strict=True)):
        check_tokens(f"data[{i}].model_input", tokens, vocabulary, longest)
        _check_keys(i, inputs, INPUTS[request.loss_fn], optional=_optional(request))
        _check_tensors(i, len(tokens), inputs, several=request.loss_fn == "cross_entropy")
        check_tokens(f"data[{i}] target_tokens", inputs["target_tokens"].flatten().tolist(), vocabulary, None)


def _check_settings(request: TrainingRequest) -> None:
    allowed = BOUNDS if request.loss_fn == "ppo" else {}
    for name, value in request.loss_fn_config.items():
        if name not in allowed or not isinstance(value, float):
            raise Refused(f"loss_fn_config[{name!r}] is no setting of {request.loss_fn}: it has {list(allowed)}")


def _optional(request: TrainingRequest) -> frozenset[str]:
    """The keys that a request need not have: a forward pass for log-probabilities only needs no weights."""
    return frozenset({"weights"} if request.forward_only and request.loss_fn == "cross_entropy" else ())


def check_tokens(where: str, tokens: Sequence[int], vocabulary: int, longest: int | None) -> None:
    """Refuse an empty or too long list of tokens, or a token that the model does not know."""
    if not tokens:
        raise Refused(f"{where} is empty")
    if longest is not None and len(tokens) > longest:
        raise Refused(f"{where} has {len(tokens)} tokens; the model takes {longest}")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise Refused(f"{where} holds a token outside the vocabulary of {vocabulary}")


def _check_keys(i: int, inputs: Mapping[str, Tensor], wanted: Collection[str], *, optional: frozenset[str]) -> None:
    missing, extra = sorted({*wanted} - inputs.keys() - optional), sorted(inputs.keys() - {*wanted})
    if missing or extra:
        raise Refused(f"data[{i}].loss_fn_inputs: missing {missing}, not known to this loss {extra}")


def _check_tensors(i: int, length: int, inputs: Mapping[str, Tensor], *, several: bool) -> None:
    targets = inputs["target_tokens"]
    shape = tuple(targets.shape) if several and targets.ndim == 2 else (length,)
    for name, tensor in inputs.items():
        where = f"data[{i}].loss_fn_inputs[{name!r}]"
        wanted = torch.int64 if name == "target_tokens" else torch.float32
        if tensor.dtype != wanted:
            raise Refused(f"{where} is {tensor.dtype}; {wanted} is needed")
        if tuple(tensor.shape) != shape or len(tensor) != length:
            raise Refused(f"{where} has shape {tuple(tensor.shape)}; model_input has {length} tokens")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refused(f"{where} holds NaN or infinity")


def summed(
    name: str, logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]], config: Mapping[str, float | str]
) -> Tensor:
    """The loss of a request: the sum over all tokens of all datums."""
    return torch.stack([_datum_loss(name, x, y, config) for x, y in zip(logprobs, inputs, strict=True)]).sum()


def _datum_loss(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float | str]) -> Tensor:
    if name == "cross_entropy":
        weights = inputs.get("weights", torch.zeros_like(logprobs))
        return -(weights.to(logprobs) * logprobs).sum()
    advantages = inputs["advantages"].to(logprobs)
    ratio = torch.exp(logprobs - inputs["logprobs"].to(logprobs))
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    low, high = (float(config.get(bound, BOUNDS[bound])) for bound in BOUNDS)
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
