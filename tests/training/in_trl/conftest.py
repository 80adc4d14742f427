"""Tiny runs that TRL carries out: a second each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.trl.conftest import precision
from tests.training.conftest import TINY

from klamp.lab.backends import launch
from klamp.lab.config import TrainConfig

__all__ = ["precision", "quick"]

QUICK: dict[str, Any] = {
    **TINY,
    "backend": "trl",
    "beta": 0.5,
    "learning_rate": 2e-2,
    "warmup_steps": 0,
    "max_steps": 3,
    "eval_every": 0,
    "save_every": 0,
    "eval_size": 1,
}
"""Three steps that move the policy by half a nat."""


CLIPPED = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "target_kl": 0.02, "kl_controller": "step"}
LOGGED = {"log_completions_every": 2, "log_completions": 5, "log_answers": 1}
WHOLE: dict[str, Any] = {**CLIPPED, **LOGGED, "max_steps": 4, "save_every": 2}


@pytest.fixture(scope="module")
def whole_run(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four steps, for tests that read it or continue a copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `precision`: not for the tests that follow
        launch(TrainConfig.from_flat({"model": llama, **QUICK, **WHOLE, "output_dir": str(folder)}), [])
    return folder


@pytest.fixture
def quick(config_of: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    return lambda **changes: config_of(**{**QUICK, **changes})
