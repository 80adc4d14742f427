"""A local server that speaks the Tinker SDK's protocol, with a small model, real autograd and AdamW behind it."""

from klamp.adapters.tinker.standin.faults import Fault
from klamp.adapters.tinker.standin.run import Standin, serve, tiny_model

__all__ = ["Fault", "Standin", "serve", "tiny_model"]
