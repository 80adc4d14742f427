"""What a real engine answers of a model, and what it keeps of the old one where new weights come."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.vllm.programs import result_of

from klamp.diagnostics.sync import START, START_HEAD, WEIGHTS
from klamp.tasks import load_named_model

HERE = Path(__file__).parent


def test_the_named_model_answers_in_its_chat_format_with_the_probabilities_of_transformers() -> None:
    folder = load_named_model("smollm2")
    found = result_of(
        HERE / "answers.py", str(folder), "What is the capital of France?", "Describe a cat in one sentence."
    )
    assert "Paris" in found["texts"][0]
    assert found["ends"][0] == "stop", "the end token of the chat format ends it"
    assert found["largest_difference"] < 1e-4


def test_the_stale_head_is_named(default_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM reloads weights and keeps its old output head, without a word."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the new weights are handed over in memory
    found = result_of(HERE / "stale.py", str(default_base_model))
    assert found["before"]["in_sync"]
    assert found["before"]["gaps"][WEIGHTS] < 1e-4
    assert found["not told"]["nearest"] == START
    half = found["reloaded"]
    assert half["nearest"] == START_HEAD, half
    assert half["gaps"][START_HEAD] < 1e-4 < 1e-3 < half["gaps"][WEIGHTS]
    assert "output head of the start" in half["text"]
