"""A stand-in for the Tinker service, to test Tinker code offline: real HTTP, a small model, real autograd and AdamW.

    from klamp.tinker.testing import Fault, serve

It is a distribution of its own, `klamp-standin`, whose names these are.
"""

from klamp.errors import missing_library

try:
    from klamp_standin import Fault, Standin, serve, tiny_model
except ModuleNotFoundError as error:
    if error.name != "klamp_standin":
        raise
    checkout = "or in a checkout of klamp: pip install ./standin"
    raise missing_library("klamp-standin", by="klamp.tinker.testing", instead=checkout) from None

__all__ = ["Fault", "Standin", "serve", "tiny_model"]
