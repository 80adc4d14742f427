"""The real model, its tokenizer, and a small model that speaks with the same tokens."""

from typing import Any

import pytest

from klamp.lab.models import load_model, load_tokenizer

SMOLLM2 = "examples/language/smollm2"
"""What examples/language/prepare.py writes."""


@pytest.fixture(scope="session")
def model() -> Any:
    return load_model(SMOLLM2)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(SMOLLM2)


def brief(completion: str, **_: Any) -> float:
    """A reward with a spread in every group, as few real texts are equally long: minus the length, in hundreds."""
    return -len(completion) / 100
