"""The stand-in without its HTTP side: routes are called as functions, and their results waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.waiting import SECONDS
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from klamp_standin import tiny_model
from klamp_standin.service import Service
from klamp_standin.training import create_model


@contextmanager
def in_process(**changes: Any) -> Iterator[Service]:
    """A service with a model of eight tokens."""
    given = {"name": "base", "tokenizer_id": "tokens", "end": [0], "seed": 3, "folder": None}
    service = Service(tiny_model(8), None, **{**given, **changes})
    yield service
    service.worker.close()


def result(service: Service, answer: dict[str, Any]) -> Any:
    """What a promised request came to."""
    found = service.worker.wait(answer["request_id"], SECONDS)
    assert found is not None
    return found


def new_run(service: Service, number: int = 0, **lora: Any) -> str:
    """The id of a fresh training run."""
    body = {"session_id": "s", "model_seq_id": number, "base_model": "base", "lora_config": lora}
    return result(service, create_model(service, body, ()))["model_id"]


def message(model_id: str, seq_id: int, *, forward_only: bool = False, **inputs: Any) -> Any:
    """A `forward_backward` request of one datum, as the SDK encodes it."""
    given = {"target_tokens": torch.tensor([2, 3]), "weights": torch.ones(2)} | inputs
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=given)
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"),
        model_id=model_id,
        seq_id=seq_id,
    )
    encoded = forward_backward_request_to_proto(asked)
    encoded.forward_only = forward_only
    return encoded


def training(model_id: str, seq_id: int, **options: Any) -> bytes:
    """Its body."""
    return message(model_id, seq_id, **options).SerializeToString()
