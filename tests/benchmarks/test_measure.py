"""Processes and memory of the measurements."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.measure import Peak, isolated

pytestmark = pytest.mark.slow

MIB = 2**20


def where_and(value: int) -> dict[str, int]:
    """Called in another process."""
    return {"pid": os.getpid(), "threads_seen": torch.get_num_threads(), "value": value}


def held_and_given_back() -> dict[str, float]:
    """Called in another process, whose memory nobody else uses; the first time loads what torch needs."""
    peak = Peak()
    for _ in range(2):
        peak.start()
        held = torch.ones(200 * MIB, dtype=torch.uint8)
        del held
    return {"extra_mib": peak.extra_mib()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the accelerator's memory there")
def test_the_peak_counts_what_was_held_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow, as all of this file: what a process holds hangs on how its machine hands out memory."""
    monkeypatch.setenv("PYTHONPATH", f"{os.path.dirname(__file__)}")  # noqa: PTH120
    assert 195 < isolated("test_measure:held_and_given_back", {}, threads=1)["extra_mib"] < 260


def test_a_run_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{os.path.dirname(__file__)}")  # noqa: PTH120
    seen = isolated("test_measure:where_and", {"value": 7})
    assert seen["value"] == 7
    assert seen["pid"] != os.getpid()
    assert seen["threads"] == seen["threads_seen"] == 1
    assert seen["load"] >= 0


def test_a_failed_run_says_what_it_was_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.path.dirname(__file__)}")  # noqa: PTH120
    with pytest.raises(RuntimeError, match=r"where_and failed with \{\}(.|\n)*missing 1 required positional argument"):
        isolated("test_measure:where_and", {})
