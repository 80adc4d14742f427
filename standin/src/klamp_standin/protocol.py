"""The wire format of the stand-in: protocol buffers for training data and samples, JSON for all else.

The messages are the SDK's own (`tinker.proto`), so that they are those of whichever version is installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

PROTO = "application/x-protobuf"
_NUMPY = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}


class Refused(Exception):
    """A request that the server refuses; the client gets an HTTP error with this text.

    Args:
        message: what is wrong, naming the datum and the key.
        status: HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """The content of a `forward_backward` request."""

    model_id: str
    seq_id: int
    tokens: list[list[int]]
    """The input tokens of each datum."""
    inputs: list[dict[str, Tensor]]
    """The `loss_fn_inputs` of each datum."""
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool


def decode_training(body: bytes) -> TrainingRequest:
    """Read a `forward_backward` request; the data that its loss needs is checked elsewhere."""
    message = _message(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in getattr(message, "loss_fn_config_v2", {}).items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return TrainingRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        tokens=[_datum_tokens(i, datum) for i, datum in enumerate(message.data)],
        inputs=[_datum_inputs(i, datum) for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config,
        forward_only=message.forward_only,
    )


def training_seq(body: bytes) -> tuple[str, int]:
    """The model and the sequence number of a `forward_backward` request, even of one that is refused."""
    message = _message(body)
    return message.model_id, message.seq_id


def _message(body: bytes) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf has an error type per implementation
        raise Refused(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def _datum_tokens(i: int, datum: Any) -> list[int]:
    found: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise Refused(f"data[{i}].model_input holds a chunk that is not text; the stand-in takes token ids only")
        found += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    return found


def _datum_inputs(i: int, datum: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        where = f"data[{i}].loss_fn_inputs[{name!r}]"
        if tensor.dtype not in _NUMPY:
            raise Refused(f"{where} has dtype {tensor.dtype}; float32 or int64 is known")
        if tensor.WhichOneof("encoding") == "sparse_csr":
            found[name] = _filled(where, tensor)
            continue
        values = np.frombuffer(tensor.dense, dtype=_NUMPY[tensor.dtype]).copy()
        shape = list(tensor.shape) or ([] if len(values) == 1 else [len(values)])  # a scalar has an empty shape
        if int(np.prod(shape)) != len(values):
            raise Refused(f"{where} says shape {shape} and carries {len(values)} values")
        found[name] = torch.from_numpy(values.reshape(shape))
    return found


def _filled(where: str, tensor: Any) -> Tensor:
    """A sparse matrix, as the SDK sends rows of K weights that are 0 for the most part, with its zeros."""
    csr = tensor.sparse_csr
    kinds = {"crow_indices": np.int64, "col_indices": np.int64, "values": _NUMPY[tensor.dtype]}
    try:
        parts = (np.frombuffer(getattr(csr, name), dtype=kind).copy() for name, kind in kinds.items())
        # of an empty part torch 2.6 takes numpy's stride of 0, and refuses it
        rows, columns, values = (torch.from_numpy(x).clone(memory_format=torch.contiguous_format) for x in parts)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(rows, columns, values, list(tensor.shape), check_invariants=True).to_dense()
    except (ValueError, RuntimeError) as error:
        raise Refused(f"{where} is no sparse matrix: {error}") from error


def encode_training(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Write the answer to `forward_backward`: the log-probabilities of each datum's targets, [N] or [N, K].

    Neighbours of one K are a record.
    """
    arrays = [x.detach().to(torch.float32).numpy() for x in logprobs]
    records = [_record(list(same), shape) for shape, same in groupby(arrays, lambda array: array.shape[1:])]
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="klamp:LossReturn", loss_fn_outputs=records, metrics=dict(metrics)
    ).SerializeToString()


def _record(arrays: Sequence[Any], shape: tuple[int, ...]) -> pb.ArrayRecord:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    batched = pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=shape,
    )
    return pb.ArrayRecord(type_tag="klamp:LossReturn", fields={"logprobs": batched}, num_datums=len(arrays))


def encode_samples(
    sequences: Sequence[tuple[list[int], list[float], bool]],
    prompt_logprobs: Sequence[float] | None,
    likeliest: tuple[Tensor, Tensor] | None = None,
) -> bytes:
    """Write the answer to `asample`.

    Args:
        sequences: per sample, its tokens, their log-probabilities, and whether it ended by itself.
        prompt_logprobs: log-probabilities of the prompt's tokens, NaN where there is none; None: not asked for.
        likeliest: ids and log-probabilities of the likeliest tokens at each position, [P, k]; None: not asked for.
    """
    message = pb.SampleResponse()
    for tokens, logprobs, ended in sequences:
        message.sequences.append(
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH,
                tokens=np.asarray(tokens, dtype=np.int32).tobytes(),
                logprobs=np.asarray(logprobs, dtype=np.float32).tobytes(),
            )
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype=np.float32).tobytes()
    if likeliest is not None:
        (length, k), (ids, logprobs) = likeliest[0].shape, (x.numpy() for x in likeliest)
        top, size = message.topk_prompt_logprobs, "length"
        if not hasattr(top, size):  # older SDKs
            size = "prompt_length"
        top.token_ids, top.logprobs, top.k = ids.astype(np.int32).tobytes(), logprobs.tobytes(), k
        setattr(top, size, length)
    return message.SerializeToString()


def prompt_tokens(prompt: Any) -> list[int]:
    """Read the token ids of a prompt in JSON."""
    found: list[int] = []
    for chunk in (prompt or {}).get("chunks", []):
        if chunk.get("type") != "encoded_text":
            raise Refused(f"the prompt holds a chunk of type {chunk.get('type')!r}; the stand-in takes token ids only")
        found += chunk["tokens"]
    return found
