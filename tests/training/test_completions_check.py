"""A run's kept completions scored again: what its sampler and its trainer reported is what its weights say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from klamp.diagnostics.sync import START, WEIGHTS
from klamp.errors import DataError
from klamp.training.backends import train_run
from klamp.training.completions_check import check_run
from klamp.training.config import TrainConfig
from klamp.training.folders import COMPLETIONS, lines_of

KEPT: dict[str, Any] = {"save_every": 1, "log_completions_every": 1, "log_completions": 8, "keep_checkpoints": 9}


Make = Callable[..., TrainConfig]


def trained(config_of: Make, **changes: Any) -> tuple[TrainConfig, Path]:
    config = config_of(**{**KEPT, "learning_rate": 2e-2, **changes})
    train_run(config)
    return config, Path(str(config.run.output_dir))


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"lora_r": 4}, {"num_iterations": 2}])
def test_klamps_own_runs_are_in_sync_at_every_step(config_of: Make, changes: dict[str, Any]) -> None:
    found = dict(check_run(*trained(config_of, **changes)))
    assert list(found) == [1, 2, 3, 4]
    for report in found.values():
        assert report.in_sync
        assert all(side.gaps[WEIGHTS] < 1e-4 for side in report.sides)


def test_log_probabilities_of_other_weights_are_named(config_of: Make) -> None:
    config, folder = trained(config_of, beta=0.1)
    file = folder / COMPLETIONS
    rows = lines_of(file)
    assert max(abs(p - r) for row in rows for p, r in zip(row["policy_logprobs"], row["ref_logprobs"], strict=True)) > 1
    file.write_text("".join(json.dumps(row | {"sampler_logprobs": row["ref_logprobs"]}) + "\n" for row in rows))
    found = dict(check_run(config, folder))
    assert found[1].in_sync, "before the first update they are the same weights"
    assert not found[4].in_sync
    sampler, trainer = found[4].sides
    assert sampler.nearest == START
    assert trainer.is_right


def test_a_run_without_such_completions_is_refused(config_of: Make) -> None:
    config, folder = trained(config_of, max_steps=2)
    (folder / COMPLETIONS).unlink()
    with pytest.raises(DataError, match="no completions can be scored again"):
        dict(check_run(config, folder))
