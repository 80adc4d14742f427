"""Where a person waits: the commands are klamp's own, and what they come to is said."""

from __future__ import annotations

import pytest

from benchmarks import waits

pytestmark = pytest.mark.slow


def test_every_command_runs_on_small_records() -> None:
    found = waits.run(quick=True)
    assert list(found["commands"]) == list(waits.COMMANDS)
    assert all(seen["seconds"][0] > 0 and seen["peak_mib"] > 5 for seen in found["commands"].values())
    assert found["sizes"]["steps"] == waits.QUICK_STEPS and found["sizes"]["log"] >= waits.QUICK_LOG_BYTES
    assert found["commands"]["klamp report"]["output_bytes"] < 2e6
    assert "`klamp train --dry-run`" in waits.text(found)
