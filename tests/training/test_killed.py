"""A run in a process of its own that is killed, and then resumed."""

import os
import signal

import pytest
from tests.training import children
from tests.training.conftest import TINY
from tests.training.test_resume import assert_same_run

from klamp.lab import checkpoint
from klamp.lab.backends import train_run

LONG = {**TINY, "beta": 0.05, "max_steps": 6, "eval_every": 2, "save_every": 3}


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize(
    ("number", "code", "newest"),
    [(signal.SIGKILL, -signal.SIGKILL, 3), (signal.SIGTERM, 130, 5), (signal.SIGINT, 130, 5)],
)
def test_a_killed_run_resumes_with_the_same_numbers(config_of, tmp_path, number, code, newest):
    """Killed in its fifth step: without warning it loses the steps since its checkpoint, with warning none."""
    parts, here, on, told = (tmp_path / name for name in ("parts", "here", "on", "told"))
    config = config_of(**LONG, output_dir=str(parts))
    child = children.start(children.paused_run, config.flat(), 5, str(here), str(on), str(told))
    train_run(config_of(**LONG, output_dir=str(tmp_path / "whole")))
    children.wait_for(here)
    os.kill(child.pid, number)
    on.touch()
    assert children.end([child]) == [code]
    assert [p.name for p in checkpoint.checkpoints(parts)][-1] == f"step-{newest:06d}"
    if number != signal.SIGKILL:
        assert told.read_text().startswith("TrainingStopped\ntraining was stopped after step 5 of 6")
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # what a write that was cut short leaves behind
    train_run(config_of(**LONG, output_dir=str(parts), resume=True))
    assert_same_run(tmp_path / "whole", parts)
