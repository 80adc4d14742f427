"""Builds the SDK's datums with every number at the position of its token.

full = prompt + response; the model reads full[:-1] and is asked about full[1:]. Every row has N = len(full) - 1
entries, of which the first len(prompt) - 1 speak of the prompt and are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.core.masking import masked
from klamp.errors import DataError, ShapeError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.padded import KLAMP_KEYS, number_row, token_ids


def build_datum(
    prompt: Sequence[int],
    response: Sequence[int],
    advantages: float | Sequence[float],
    logprobs: Sequence[float],
    ref_logprobs: Sequence[float] | None = None,
    *,
    mask: Sequence[float] | None = None,
    kl_mask: Sequence[float] | None = None,
) -> Any:
    """One completion as a `tinker.Datum`, everything aligned with the tokens that it speaks of.

    The rows `advantages`, `logprobs`, `mask`, and where given `ref_logprobs` and `kl_mask`, are float32 tensors of
    `target_tokens`'s length; the SDK converts only lists of the keys that it knows, and refuses bools.

    Args:
        prompt: token ids, at least one.
        response: token ids of the completion, the end token included, at least one.
        advantages: of the completion, or of each of its tokens.
        logprobs: of the sampler, in nats, one per token of the response.
        ref_logprobs: of the reference (`compute_reference_logprobs`); needed where there is a KL in loss or advantage.
        mask: 1 = train on the token; None: on every token of the response. Advantages are 0 where it is 0.
        kl_mask: 1 = the token carries the KL (`kl_exclude_*`); None: as `mask`.

    Raises:
        DataError: no prompt, no response, a token id that is no whole number, or None among the numbers.
        ShapeError: a row that has another length than the response.
        UnsupportedVersion: the SDK is missing or outside the range.
    """
    tinker = load_tinker()
    prompt, response = token_ids("prompt", prompt), token_ids("response", response)
    if len(prompt) == 0 or len(response) == 0:
        raise DataError(
            "a datum needs at least one token of prompt and one of response",
            got=f"{len(prompt)} tokens of prompt, {len(response)} of response",
            why="the first token of a sequence has no log-probability",
            fix="start the prompt with the beginning-of-sequence token; leave out completions without a token",
        )
    trained = _row("mask", [1.0] * len(response) if mask is None else mask, len(response)) != 0
    spread = number_row("advantages", advantages).float()
    spread = spread.expand(len(response)) if spread.ndim == 0 else spread
    rows = {
        "advantages": masked(_row("advantages", spread, len(response)), trained),
        "logprobs": _row("logprobs", logprobs, len(response)),
        "mask": trained.float(),
    }
    for name, values in (("ref_logprobs", ref_logprobs), ("kl_mask", kl_mask)):
        if values is not None:
            rows[name] = _row(name, values, len(response))
    full = prompt + response
    inputs = {"target_tokens": torch.tensor(full[1:], dtype=torch.int64)}
    inputs |= {name: torch.cat([torch.zeros(len(prompt) - 1), row]) for name, row in rows.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_torch(row) for name, row in inputs.items()},
    )


def strip_for_builtin(datums: Sequence[Any]) -> list[Any]:
    """The datums without the keys that the service's built-in losses refuse: ref_logprobs, mask, kl_mask.

    A built-in loss sees every position, so that advantages are set to 0 where the mask was 0. The arguments stay as
    they are.

    Raises:
        UnsupportedVersion: the SDK is missing or outside the range.
    """
    stripped = []
    for datum in datums:
        inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name not in KLAMP_KEYS}
        if "mask" in datum.loss_fn_inputs and "advantages" in inputs:
            trained = datum.loss_fn_inputs["mask"].to_torch() != 0
            inputs["advantages"] = tensor_data(masked(inputs["advantages"].to_torch(), trained))
        stripped.append(with_inputs(datum, inputs))
    return stripped


def with_inputs(datum: Any, inputs: dict[str, Any]) -> Any:
    """A datum with other `loss_fn_inputs`; where the SDK keeps a datum's origin, that is kept."""
    spans = ("model_input_spans", "loss_fn_input_spans")
    kept = {name: getattr(datum, name) for name in spans if getattr(datum, name, None) is not None}
    return load_tinker().Datum(model_input=datum.model_input, loss_fn_inputs=inputs, **kept)


def tensor_data(row: Tensor) -> Any:
    """A row of numbers as the SDK sends it, in float32."""
    return load_tinker().TensorData.from_torch(row.detach().float())


def _row(name: str, values: Sequence[float] | Tensor, length: int) -> Tensor:
    row = number_row(name, values).float()
    if row.shape != (length,):
        raise ShapeError(
            f"{name} does not have one number per token of the response",
            got=f"{name} {tuple(row.shape)}, response ({length},)",
            why="each number belongs to one token",
            fix="pass the values of the response only; build_datum adds the zeros of the prompt",
        )
    return row
