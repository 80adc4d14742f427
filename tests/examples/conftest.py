"""The built-in model is taught before an example asks for it; a program is run as a reader runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEBUG = {"debug/kl_mean", "debug/kl_max", "debug/kl_min", "debug/ref_logp_mean", "debug/policy_logp_mean"}
built_in = pytest.mark.usefixtures("default_base_model")


def run(*arguments: str, folder: Path = ROOT) -> str:
    """What Python prints; it has to succeed."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def scalars(folder: Path) -> dict[str, list[float]]:
    """Name -> values that a program wrote for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
