"""The stand-in for the Tinker service and its clients."""

from tests.standin import *  # noqa: F403  (fixtures, which its __all__ names)
