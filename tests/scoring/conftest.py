"""The tiny models on disk of the trainer's tests."""

from tests.training.conftest import gpt2, llama

__all__ = ["gpt2", "llama"]
