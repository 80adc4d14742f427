"""What a GPU will be asked: the dry mode runs whole on a CPU, and nothing else runs without a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.benchmarks import made_up

from benchmarks import gpu

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
    text = gpu.text(made_up.gpu_results())
    assert "`linear_logprobs`, gradient of hidden, largest difference to float64: 1.0e-06 (at most 1e-05: met)" in text
    assert "1.0e-03 (at most 1e-05: **missed**)" in text
