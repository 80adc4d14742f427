"""The stand-in for the Tinker service and its clients."""

from tests.standin import reference, service, shared_standin, standin, trainer

__all__ = ["reference", "service", "shared_standin", "standin", "trainer"]
