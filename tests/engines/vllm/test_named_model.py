"""The named model in a real vLLM: the folder that `klamp model smollm2` prints is one that the engine serves."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.programs import result_of

from klamp.tasks import load_named_model

HERE = Path(__file__).parent


def test_it_answers_in_its_chat_format_with_the_probabilities_of_transformers() -> None:
    folder = load_named_model("smollm2")
    found = result_of(
        HERE / "answers.py", str(folder), "What is the capital of France?", "Describe a cat in one sentence."
    )
    assert "Paris" in found["texts"][0]
    assert found["ends"][0] == "stop", "the end token of the chat format ends it"
    assert found["largest_difference"] < 1e-4
