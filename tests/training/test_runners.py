"""What trains with a backend, and where its newest model is."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.training.runners import newest_policy, trainer_of


@pytest.mark.parametrize(
    ("backend", "module"),
    [
        ("local", "klamp.training.trainer"),
        ("trl", "klamp.training.in_trl.train"),
        ("verl", "klamp.training.in_verl.train"),
        ("tinker", "klamp.training.service.train"),
    ],
)
def test_each_has_its_own(backend, module) -> None:
    assert trainer_of(backend).__module__ == module


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), None),
        (("step-000002", "step-000010"), "step-000010/policy"),
        (("checkpoint-2", "checkpoint-10"), "checkpoint-10"),
        (("global_step_2", "global_step_10"), "global_step_10/actor/huggingface"),
        (("step-000002", "step-000002.bak"), "step-000002/policy"),
    ],
)
def test_the_newest_policy(tmp_path: Path, names: tuple[str, ...], expected: str | None) -> None:
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    found = newest_policy(tmp_path)
    assert found == (None if expected is None else tmp_path / "checkpoints" / expected)
