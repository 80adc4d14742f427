"""The trials at the smallest sizes run whole: what a GPU will be asked, and where a person waits."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu, waits

pytestmark = pytest.mark.slow


def test_the_dry_mode_runs_every_part_and_agrees_with_float64() -> None:
    found = gpu.run(quick=True)
    assert {row["case"] for row in found["heads"]} == set(gpu.CHECKED)
    for row in found["heads"]:
        assert row["worst"] and all(0 < worst <= gpu.BOUNDS["float32"] for worst in row["worst"].values()), row
    assert set(next(row for row in found["heads"] if "frozen" in row["case"])["worst"]) == {"hidden"}
    device, cpu = (found["steps"][place]["rows"] for place in ("device", "cpu"))
    assert len(device) == gpu.STEPS
    if not torch.cuda.is_available():
        assert device == cpu
    assert {run["trainer"] for run in found["parts"]["step"]["runs"]} == {"trl", "fast", "klamp", "floor"}
    text = gpu.text(found)
    assert "missed" not in text.partition("## Output heads")[0] and "## A whole GRPO step" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(SystemExit, match="--quick"):
        gpu.run(quick=False)


def test_a_head_that_differs_is_named() -> None:
    found = [
        {"case": case, "dtype": "float32", "worst": {"hidden": worst}}
        for case, worst in zip(gpu.CHECKED[:2], (1e-6, 1e-3), strict=True)
    ]
    text = gpu.text({"heads": found, "steps": {"device": {"rows": []}, "cpu": {"rows": []}}, "parts": {}})
    assert "`linear_logprobs`, gradient of hidden, largest difference to float64: 1.0e-06 (at most 1e-05: met)" in text
    assert "1.0e-03 (at most 1e-05: **missed**)" in text


def test_every_command_that_is_waited_for_runs_on_small_records() -> None:
    found = waits.run(quick=True)
    assert list(found["commands"]) == list(waits.COMMANDS)
    assert all(seen["seconds"][0] > 0 and seen["peak_mib"] > 5 for seen in found["commands"].values())
    assert found["sizes"]["steps"] == waits.QUICK_STEPS and found["sizes"]["log"] >= waits.QUICK_LOG_BYTES
    assert found["commands"]["klamp report"]["output_bytes"] < 2e6
    assert "`klamp train --dry-run`" in waits.text(found)
