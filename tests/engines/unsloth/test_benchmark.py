"""The benchmark of Unsloth's step takes the steps that are asked for."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import isolated
from benchmarks.step_runs import Setting, write_setting


def test_its_trainer_takes_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    model, prompts = write_setting(tmp_path, "tiny", 8)
    setting = Setting(trainer="unsloth", model=model, prompts=prompts, completion=8, steps=2, warmup=1)
    found = isolated("benchmarks.step_runs:one", {"setting": setting.to_dict()}, threads=1)
    assert len(found["seconds"]) == 1 and found["tokens"] == 2 * 8 * 8
