"""The wire: what the SDK's own encoder writes is read back, and what the stand-in writes the SDK reads back."""

from __future__ import annotations

import math

import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from klamp_standin import protocol
from klamp_standin.protocol import Refused


def encoded(loss_fn_config=None, **inputs):
    given = {"target_tokens": torch.tensor([2, 3]), "weights": torch.tensor([0.5, -1.0])} | inputs
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=given)
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=[datum], loss_fn="cross_entropy", loss_fn_config=loss_fn_config
        ),
        model_id="m",
        seq_id=7,
    )
    return forward_backward_request_to_proto(asked)


def test_a_request_is_read_as_it_was_written():
    message = encoded({"clip_low_threshold": 0.5})
    message.forward_only = True
    found = protocol.decode_training(message.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("m", 7, "cross_entropy", True)
    assert found.tokens == [[1, 2]]
    assert found.inputs[0]["target_tokens"].tolist() == [2, 3]
    assert found.inputs[0]["weights"].tolist() == [0.5, -1.0]
    assert found.loss_fn_config == {"clip_low_threshold": 0.5}
    assert protocol.training_seq(message.SerializeToString()) == ("m", 7)


def test_a_sparse_tensor_is_refused():
    sparse = torch.zeros(2, 8, dtype=torch.int64)
    sparse[0, 1] = 3
    with pytest.raises(Refused, match="is sparse"):
        protocol.decode_training(encoded(target_tokens=sparse).SerializeToString())


def test_a_shape_that_does_not_fit_its_values_is_refused():
    message = encoded()
    message.data[0].loss_fn_inputs["weights"].shape[:] = [3]
    with pytest.raises(Refused, match=r"shape \[3\] and carries 2 values"):
        protocol.decode_training(message.SerializeToString())


def test_a_training_answer_is_read_by_the_sdk():
    raw = protocol.encode_training([torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])], {"loss:sum": 3.0})
    found = deserialize_proto_response(raw, types.ForwardBackwardOutput)
    assert [list(row["logprobs"].data) for row in found.loss_fn_outputs] == [[-1.0, -2.0], [-0.5]]
    assert found.metrics == {"loss:sum": 3.0}


def test_a_sampling_answer_is_read_by_the_sdk():
    raw = protocol.encode_samples([([1, 2], [-0.5, -1.5], True), ([3], [-2.0], False)], [math.nan, -0.25])
    found = deserialize_proto_response(raw, types.SampleResponse)
    assert [list(row.tokens) for row in found.sequences] == [[1, 2], [3]]
    assert [list(row.logprobs) for row in found.sequences] == [[-0.5, -1.5], [-2.0]]
    assert [row.stop_reason for row in found.sequences] == ["stop", "length"]
    assert found.prompt_logprobs == [None, -0.25]


def test_a_prompt_of_images_is_refused():
    with pytest.raises(Refused, match="'image'"):
        protocol.prompt_tokens({"chunks": [{"type": "image", "data": ""}]})
