"""The HTTP side: what it refuses, what it counts, where it listens; a model and a tokenizer of one's own."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest
import tinker
from tests.standin import ready
from tests.waiting import SECONDS
from tinker import types

from klamp.tasks import arithmetic_tokenizer
from klamp_standin import serve, tiny_model


def post(standin, path, body, **headers):
    request = urllib.request.Request(
        f"{standin.url}/api/v1/{path}",
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"X-API-Key": "tml-x", "Content-Type": "application/json"} | headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        ("create_session", {}, {"X-API-Key": "nothing"}, 401, "tml-"),
        ("nonsense", {}, {}, 404, "no POST nonsense"),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "gpt"}, {}, 404, "no base model 'gpt'"),
        ("create_model", {"session_id": "s"}, {}, 400, "does not fit create_model"),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0}, {}, 404, "no base model None"),
        ("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": {}}, {}, 404, "no training run 'm'"),
        ("forward_backward", b"{}", {}, 415, "x-protobuf"),
        ("forward_backward", b"\xff", {"Content-Type": "application/x-protobuf"}, 400, "ForwardBackwardRequest"),
        ("asample", {"sampling_session_id": "s", "prompt": {}}, {}, 404, "no sampler 's'"),
        ("retrieve_future", {"request_id": "r"}, {}, 404, "no request 'r'"),
    ],
)
def test_what_does_not_fit_is_an_http_error_with_the_reason(standin, path, body, headers, status, words):
    found, answer = post(standin, path, body, **headers)
    assert (found, words in answer["error"]) == (status, True), answer


def test_it_listens_on_the_loopback_interface_only(standin):
    host, port = standin._server.socket.getsockname()
    assert host == "127.0.0.1" and standin.url == f"http://127.0.0.1:{port}"
    with socket.create_connection((host, port), timeout=SECONDS):
        pass


def test_requests_are_counted_by_route(standin, reference):
    before = standin.requests.copy()
    reference.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(timeout=SECONDS)
    assert standin.requests["asample"] == before["asample"] + 1
    assert standin.requests["retrieve_future"] == before["retrieve_future"] + 1
    assert standin.requests["forward_backward"] == before["forward_backward"]


def test_capabilities_name_the_model(standin, service):
    if hasattr(getattr(tinker, "RestClient", None), "get_server_capabilities"):
        found = tinker.RestClient().get_server_capabilities().result(timeout=SECONDS)
    else:
        found = service.get_server_capabilities()
    assert [model.model_name for model in found.supported_models] == [standin.base_model]


def test_it_serves_a_model_and_tokenizer_of_ones_own():
    tokenizer = arithmetic_tokenizer()
    model = tiny_model(len(tokenizer), seed=3)
    with serve(model, tokenizer, name="me/mine") as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = ready(service.create_lora_training_client("me/mine", rank=2))
        assert client.get_tokenizer().get_vocab() == tokenizer.get_vocab()
        sampler = ready(service.create_sampling_client(base_model="me/mine"))
        prompt = tokenizer("1+2=", add_special_tokens=False)["input_ids"]
        row = (
            sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=30, seed=1))
            .result(timeout=SECONDS)
            .sequences[0]
        )
        assert (row.stop_reason == "stop") == (row.tokens[-1] == tokenizer.eos_token_id)
        assert standin.environment["TINKER_BASE_URL"] == standin.url
