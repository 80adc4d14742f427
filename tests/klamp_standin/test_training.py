"""The routes of training: fresh runs, gradients that add up, steps, checkpoints, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.klamp_standin.routes import in_process, new_run, result, training
from tinker import types
from tinker.proto.response_conv import deserialize_proto_response

from klamp_standin import training as routes
from klamp_standin.faults import Fault
from klamp_standin.protocol import Refused

ADAM = {"learning_rate": 0.003, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@pytest.fixture(scope="module")
def service():
    with in_process() as made:
        yield made


def trained(service, model_id, number, *, faults=(), **options):
    raw = result(service, routes.forward_backward(service, training(model_id, number, **options), faults))
    return deserialize_proto_response(raw, types.ForwardBackwardOutput) if isinstance(raw, bytes) else raw


def gradients(service, model_id):
    tensors = service.run(model_id).weights.tensors
    return {name: x.grad.clone() for name, x in tensors.items() if x.grad is not None}


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


def test_gradients_add_up_until_a_step_uses_them(service):
    model_id = new_run(service, 30, rank=2)
    first = trained(service, model_id, 1)
    once = gradients(service, model_id)
    trained(service, model_id, 2)
    assert all(torch.allclose(x, 2 * once[name]) for name, x in gradients(service, model_id).items())
    norm = torch.stack([2 * x.norm() for x in once.values()]).norm()
    body = {"model_id": model_id, "seq_id": 3, "adam_params": ADAM}
    assert result(service, routes.optim_step(service, body, ()))["metrics"] == {
        "grad_norm:mean": pytest.approx(float(norm), rel=1e-5)
    }
    after = trained(service, model_id, 4, forward_only=True)
    assert after.metrics["loss:sum"] < first.metrics["loss:sum"]


def test_a_forward_pass_alone_leaves_no_gradient_and_counts_apart(service):
    model_id, before = new_run(service, 40, rank=2), service.tokens.copy()
    trained(service, model_id, 1, forward_only=True)
    assert gradients(service, model_id) == {}
    trained(service, model_id, 2)
    found = service.tokens - before
    assert (found["forward"], found["forward_backward"]) == (2, 2)


def test_a_refused_request_does_not_hold_up_the_next_one(service):
    model_id = new_run(service, 50, rank=2)
    with pytest.raises(Refused, match="weights"):
        routes.forward_backward(service, training(model_id, 1, weights=torch.ones(3)), ())
    assert trained(service, model_id, 2).metrics["loss:sum"] > 0


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


def test_saved_weights_go_on_where_they_were(service):
    model_id = new_run(service, 80, rank=2)
    trained(service, model_id, 1)
    result(service, routes.optim_step(service, {"model_id": model_id, "seq_id": 2, "adam_params": ADAM}, ()))
    path = result(service, routes.save_weights(service, {"model_id": model_id, "seq_id": 3, "path": "p"}, ()))["path"]
    assert path == f"tinker://{model_id}/weights/p"
    saved = trained(service, model_id, 4, forward_only=True).metrics["loss:sum"]
    body = {"session_id": "s", "model_seq_id": 81, "path": path, "optimizer": True}
    other = result(service, routes.load_weights(service, body, ()))["model_id"]
    assert trained(service, other, 1, forward_only=True).metrics["loss:sum"] == pytest.approx(saved)
    found = routes.weights_info(service, {"tinker_path": path})
    assert (found["base_model"], found["lora_rank"]) == ("base", 2)


def test_nan_is_put_into_the_answer_and_not_into_the_weights(service):
    model_id = new_run(service, 90, rank=2)
    found = trained(service, model_id, 1, faults=[Fault(kind="nan", route="forward_backward")])
    assert [x != x for x in found.loss_fn_outputs[0]["logprobs"].data] == [False, True]
    assert all(x.isfinite().all() for x in gradients(service, model_id).values())
