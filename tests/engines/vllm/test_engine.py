"""What a real engine keeps of the old model where new weights come."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.vllm.programs import result_of

from klamp.hosts.common.sampler_weights import START, START_HEAD, WEIGHTS

HERE = Path(__file__).parent


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
