"""Where a person waits: the commands are klamp's own, and what they come to is said."""

from __future__ import annotations

import pytest
from tests.benchmarks import made_up

from benchmarks import waits

pytestmark = pytest.mark.slow


def test_every_command_runs_on_small_records() -> None:
    found = waits.run(quick=True)
    assert list(found["commands"]) == list(waits.COMMANDS)
    assert all(seen["seconds"][0] > 0 and seen["peak_mib"] > 5 for seen in found["commands"].values())
    assert found["sizes"]["steps"] == waits.QUICK_STEPS and found["sizes"]["log"] >= waits.QUICK_LOG_BYTES
    assert found["commands"]["klamp report"]["output_bytes"] < 2e6
    assert "`klamp train --dry-run`" in waits.text(found)


def test_the_doctor_is_compared_with_reading_the_log() -> None:
    text = waits.text(made_up.wait_results())
    assert "2.0 times as long as reading its JSON alone, and holds 477 MiB at most, libraries included" in text
    assert "with the long run, a record 10.0 times as small, 477 MiB" in text
    assert "4 runs of one step, one after the other: 0.5 s each" in text
    assert "5,000 steps and 50,000 completions (100 MB); its report has 1.50 MB" in text
