"""Stand-ins for the Tinker service and the SDK pointed at them: fixtures, taken by the conftest.py of three folders."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.waiting import SECONDS

__all__ = [
    "client",
    "connection",
    "context",
    "reference",
    "run_of",
    "service",
    "shared_standin",
    "shared_tiny",
    "standin",
    "tiny",
    "trainer",
]
"""The fixtures."""

FLAGS = ["--backend", "tinker", "--model", "klamp/tiny", "--lora_r", "4", "--prompts_per_step", "2", "--report_to"]
FLAGS += ["--num_generations", "3", "--eval_size", "1", "--max_completion_length", "6", "--warmup_steps", "0"]
"""Of a short `klamp train` at the stand-in."""


@pytest.fixture(scope="session")
def shared_standin() -> Iterator:
    """A stand-in that every test of a worker shares; leave it without faults."""
    pytest.importorskip("tinker")
    from klamp.tinker.testing import serve

    with serve() as standin:
        yield standin


@pytest.fixture
def standin(shared_standin, monkeypatch):
    """The shared stand-in, with the SDK's environment set to it; faults that a test injects end with the test."""
    for name, value in shared_standin.environment.items():
        monkeypatch.setenv(name, value)
    yield shared_standin
    shared_standin.inject()


@pytest.fixture
def service(standin):
    """The SDK's entry point to the stand-in."""
    import tinker

    return tinker.ServiceClient()


def ready(client):
    """A client that some versions of the SDK hand out as a future."""
    return client.result() if hasattr(client, "result") else client


@pytest.fixture
def trainer(service, standin):
    """A training client with a fresh adapter."""
    return ready(service.create_lora_training_client(base_model=standin.base_model, rank=4, seed=1))


@pytest.fixture
def reference(service, standin):
    """A sampling client of the base model."""
    return ready(service.create_sampling_client(base_model=standin.base_model))


@pytest.fixture(scope="session")
def shared_tiny() -> Iterator:
    """A stand-in that serves the tiny Llama of the trainer's tests, with its tokenizer."""
    pytest.importorskip("tinker")
    from tests.training.conftest import tiny_llama

    from klamp.tasks import arithmetic_tokenizer
    from klamp.tinker.testing import serve

    with serve(tiny_llama(), arithmetic_tokenizer(), name="klamp/tiny") as standin:
        yield standin


@pytest.fixture
def tiny(shared_tiny, monkeypatch):
    """The same, with the SDK's environment set to it; faults that a test injects end with the test."""
    for name, value in shared_tiny.environment.items():
        monkeypatch.setenv(name, value)
    yield shared_tiny
    shared_tiny.inject()


def tiny_run(**changes):
    """The configuration of a tiny run with backend `tinker`, with some values changed."""
    from tests.training.conftest import TINY

    from klamp.training.config import TrainConfig

    own = {"backend": "tinker", "model": "klamp/tiny", "lora_r": 4, "service_timeout": SECONDS, "cpu": False}
    return TrainConfig.from_flat({**TINY, **own, **changes})


@pytest.fixture
def run_of(tmp_path):
    """`tiny_run` in tmp_path/run."""
    return lambda **changes: tiny_run(**{"output_dir": str(tmp_path / "run")} | changes)


@pytest.fixture
def connection(tiny):
    """A session of the trainer's with `tiny`."""
    from klamp.training.service.connection import Connection

    return Connection(SECONDS)


@pytest.fixture
def client(connection, tiny):
    """A sampling client of its base model."""
    return ready(connection.service.create_sampling_client(base_model=tiny.base_model))


@pytest.fixture
def context(run_of):
    """What sampling reads of a run."""
    import torch

    from klamp.config import build_objective
    from klamp.hosts.common.control import KLControl
    from klamp.tasks import arithmetic_tokenizer, load_task

    config, tokenizer = run_of(kl_clip_method="hard"), arithmetic_tokenizer()
    return SimpleNamespace(
        config=config,
        tokenizer=tokenizer,
        task=load_task(config.task, tokenizer),
        pad=tokenizer.pad_token_id,
        reference=None,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        control=KLControl(config.kl),
        process=0,
        processes=1,
        device=torch.device("cpu"),
        sum_over_processes=lambda x: x,
    )


def saved_step(folder):
    """The step of a run's newest checkpoint."""
    from klamp.training import checkpoint

    return checkpoint.load_state(checkpoint.newest(folder))["step"]
