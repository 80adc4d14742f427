"""The stand-in for the Tinker service and its clients."""

from tests.standin import (
    client,
    connection,
    context,
    reference,
    run_of,
    service,
    shared_standin,
    shared_tiny,
    standin,
    tiny,
    trainer,
)

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
