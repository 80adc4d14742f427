"""Real processes, one of which dies or hangs: the others end, and say what torch told them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.training import children
from tests.training.conftest import TINY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {**TINY, "prompts_per_step": 2, "max_steps": 6, "eval_every": 0, "save_every": 1, "eval_size": 1}
BASE |= {"reward": "tests.training.rewards:faulty", "report_to": "none"}
IN_STEP_3 = 3 + 2 * 4 + 2
"""Calls of the reward in one process until there: an answer to each of three skills, then four a step."""

LOST = "the processes of the run lost each other"


def launched(llama: str, folder: Path, fault: str, **changes: Any) -> subprocess.Popen[str]:
    """Two processes of `klamp train` under torchrun."""
    values = {**BASE, "model": llama, "output_dir": str(folder), **changes}
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "klamp.cli"]
    around = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "FAULT": fault, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [*launch, "train", *flags, "--cpu"],
        env=os.environ | around,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said_by(launcher: subprocess.Popen[str]) -> str:
    said, _ = launcher.communicate(timeout=children.SECONDS)
    assert launcher.returncode not in (0, None), said
    return said


def seconds_since(folder: Path) -> float:
    """How long ago the last step was written, which was just before a process died or hung."""
    return time.time() - (folder / "metrics.jsonl").stat().st_mtime


def newest(folder: Path) -> Path:
    """The newest checkpoint."""
    return max((folder / "checkpoints").glob("*-*[0-9]"), key=lambda each: int(re.split("[-_]", each.name)[-1]))


def test_one_that_dies_ends_the_others_with_the_newest_checkpoint_named(llama, tmp_path):
    said = said_by(launched(llama, tmp_path / "run", f"exit:1:{IN_STEP_3}"))
    assert seconds_since(tmp_path / "run") < 60, "whatever process_timeout is"
    assert LOST in said and str(newest(tmp_path / "run")) in said
    assert re.search(r"rank\s*: 1 ", said), "torchrun says which one it was"
    assert said.count("Traceback") <= 1, "torchrun's own"


def test_under_trl_one_that_hangs_ends_the_others_after_the_time_limit(llama, tmp_path):
    said = said_by(launched(llama, tmp_path / "run", f"hang:1:{IN_STEP_3}", backend="trl", process_timeout=10))
    assert LOST in said and "process_timeout=10 s" in said
    assert str(newest(tmp_path / "run")) in said
    assert said.count("Traceback") <= 1, "torchrun's own"


@pytest.mark.gate
def test_without_a_launcher_the_other_one_says_so_too(llama, tmp_path):
    """Where the first process is the one, which holds the store and writes the run's folder."""
    values = {**BASE, "model": llama, "output_dir": str(tmp_path / "run"), "process_timeout": 8.0, "report_to": ()}
    values["environment"] = {"FAULT": f"exit:0:{IN_STEP_3}"}
    ports, told = children.free_ports(1), [tmp_path / f"told-{rank}" for rank in range(2)]
    pair = [children.start(children.one_of_several, rank, 2, ports, [values], str(told[rank])) for rank in (0, 1)]
    children.wait_for(told[1])
    (end,) = json.loads(told[1].read_text())
    assert end.startswith(f"TrainerFailed: {LOST}") and str(newest(tmp_path / "run")) in end
    assert children.end(pair) == [7, 0]
