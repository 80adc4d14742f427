"""Stand-ins for the Tinker service and the SDK pointed at them: fixtures, taken by the conftest.py of two folders."""

from collections.abc import Iterator

import pytest

__all__ = ["reference", "service", "shared_standin", "standin", "trainer"]
"""The fixtures."""


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


def opened(standin):
    import tinker

    return tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)


@pytest.fixture(scope="session")
def service(shared_standin):
    """A client that every test of a worker shares: to open one takes longer than most tests."""
    return opened(shared_standin)


def ready(client):
    return client.result() if hasattr(client, "result") else client


@pytest.fixture
def trainer(service, standin):
    return ready(service.create_lora_training_client(base_model=standin.base_model, rank=4, seed=1))


@pytest.fixture(scope="session")
def reference(service, shared_standin):
    return ready(service.create_sampling_client(base_model=shared_standin.base_model))
