"""Runs with something planted in them show what any seed of them must (`python -m tests.recorded --seeds 10`)."""

from pathlib import Path

import pytest
from tests.recorded.plants import RUNS, train

SURE = ("adapter-not-zero", "wrong-reference", "dr-grpo-with-a-rule")
"""What these show was planted before the first step, and nothing of it is learned."""


@pytest.mark.usefixtures("default_base_model")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SURE else pytest.mark.slow) for name in RUNS])
def test_a_planted_run_shows_what_it_must(name: str, tmp_path: Path) -> None:
    diagnosis = train(RUNS[name], tmp_path)
    assert RUNS[name].misses(diagnosis) == [], [finding.in_a_line for finding in diagnosis.findings]
