"""Saved state: the same weights, the same next step, also in another server."""

import pytest
import tinker
import torch
from tests.standin import ready
from tests.waiting import SECONDS
from tinker import types

from klamp_standin import serve

DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4]), "weights": torch.ones(3)},
    )
]


def train(client, steps=1):
    for _ in range(steps):
        client.forward_backward(DATA, "cross_entropy").result(timeout=SECONDS)
        client.optim_step(types.AdamParams(learning_rate=0.01)).result(timeout=SECONDS)


def loss(client):
    return client.forward(DATA, "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"]


def test_a_run_goes_on_from_its_checkpoint_in_another_server(tmp_path):
    with serve(folder=tmp_path) as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = ready(service.create_lora_training_client(standin.base_model, rank=2, seed=0))
        train(client, 3)
        path = client.save_state("three").result(timeout=SECONDS).path
        saved = loss(client)
        train(client, 2)
        expected = loss(client)
    assert path.startswith("tinker://")
    assert path.endswith("/weights/three")
    with serve(folder=tmp_path) as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = ready(service.create_training_client_from_state_with_optimizer(path))
        assert loss(client) == saved
        train(client, 2)
        assert loss(client) == expected
        weights_only = ready(service.create_training_client_from_state(path))
        assert loss(weights_only) == saved
        train(weights_only, 2)
        assert loss(weights_only) != expected
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            ready(service.create_training_client_from_state(path + "x"))


def test_a_snapshot_stays_when_the_weights_move(trainer, service):
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    snapshot = ready(trainer.save_weights_and_get_sampling_client())
    path = trainer.save_weights_for_sampler("named").result(timeout=SECONDS).path
    before = snapshot.compute_logprobs(prompt).result(timeout=SECONDS)
    train(trainer, 2)
    for still in (snapshot, ready(service.create_sampling_client(model_path=path))):
        assert still.compute_logprobs(prompt).result(timeout=SECONDS) == before
    moved = ready(trainer.save_weights_and_get_sampling_client())
    assert moved.compute_logprobs(prompt).result(timeout=SECONDS) != before
