"""The routes of training: fresh runs, what they cost, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.klamp_standin.routes import in_process, new_run, result, training
from tinker import types
from tinker.proto.response_conv import deserialize_proto_response

from klamp_standin import training as routes
from klamp_standin.protocol import Refused


@pytest.fixture(scope="module")
def service():
    with in_process() as made:
        yield made


def trained(service, model_id, number, **options):
    raw = result(service, routes.forward_backward(service, training(model_id, number, **options), ()))
    return deserialize_proto_response(raw, types.ForwardBackwardOutput)


def test_a_fresh_run_changes_nothing_and_depends_on_its_seed(service):
    one, same, other = (new_run(service, 10 + i, rank=2, seed=seed) for i, seed in enumerate((1, 1, 2)))
    tensors = [service.run(each).weights.tensors for each in (one, same, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert any(not torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])
    scores = [trained(service, each, 1, forward_only=True).metrics["loss:sum"] for each in (one, other)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6), "B is 0, so A does not matter yet"


def test_what_a_run_is_made_of(service):
    model_id = new_run(service, 20, rank=3)
    found = routes.get_info(service, {"model_id": model_id})
    assert (found["lora_rank"], found["model_name"], found["model_data"]["tokenizer_id"]) == (3, "base", "tokens")


def test_tokens_of_a_forward_pass_count_apart(service):
    model_id, before = new_run(service, 40, rank=2), service.tokens.copy()
    trained(service, model_id, 1, forward_only=True)
    trained(service, model_id, 2)
    found = service.tokens - before
    assert (found["forward"], found["forward_backward"]) == (2, 2)


def test_a_step_without_settings_is_an_error_of_the_request(service):
    model_id = new_run(service, 60)
    found = result(service, routes.optim_step(service, {"model_id": model_id, "seq_id": 1}, ()))
    assert found["category"] == "user"
    assert "adam_params are missing" in found["error"]


def test_another_optimizer_model_or_run_is_refused(service):
    body = {"session_id": "s", "model_seq_id": 70, "base_model": "base", "optimizer_config": {"type": "muon"}}
    with pytest.raises(Refused, match="no optimizer 'muon'"):
        routes.create_model(service, body, ())
    with pytest.raises(Refused, match="no base model 'other'"):
        routes.create_model(service, body | {"base_model": "other"}, ())
    with pytest.raises(Refused, match="no training run"):
        routes.forward_backward(service, training("nobody", 1), ())
