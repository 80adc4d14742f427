"""Clients of the stand-in that all tests of a worker share: to open a service takes longer than most tests."""

import pytest
import tinker
from tests.standin import ready


def opened(standin):
    return tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)


@pytest.fixture(scope="session")
def service(shared_standin):
    return opened(shared_standin)


@pytest.fixture(scope="session")
def reference(service, shared_standin):
    return ready(service.create_sampling_client(base_model=shared_standin.base_model))
