"""The stand-in for the Tinker service and its clients."""

from tests.hosts.tinker.clients import reference, service
from tests.standin import shared_standin, standin, trainer

__all__ = ["reference", "service", "shared_standin", "standin", "trainer"]
