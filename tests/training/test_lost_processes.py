"""Real processes, one of which dies or hangs, or whose launcher is killed: the others end, and say why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.training import children
from tests.training.conftest import TINY, rows_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {**TINY, "prompts_per_step": 2, "max_steps": 6, "eval_every": 0, "save_every": 1, "eval_size": 1}
BASE |= {"reward": "tests.training.rewards:faulty", "report_to": "none"}
IN_STEP_3 = 3 + 2 * 4 + 2
"""Calls of the reward in one process until there: an answer to each of three skills, then four a step."""

ONE = r"process 1 of 2 \(process \d+ on .*\)"


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


def test_a_process_that_dies_is_named_with_the_newest_checkpoint(llama, tmp_path):
    said = said_by(launched(llama, tmp_path / "run", f"exit:1:{IN_STEP_3}"))
    assert seconds_since(tmp_path / "run") < 60, "whatever process_timeout is"
    assert re.search(f"{ONE} is gone.* it was in: step \\d: the reward function", said), said
    assert str(newest(tmp_path / "run")) in said
    assert said.count("Traceback") <= 1, "torchrun's own"


def test_under_trl_a_process_that_hangs_is_named_by_the_others(llama, tmp_path):
    said = said_by(launched(llama, tmp_path / "run", f"hang:1:{IN_STEP_3}", backend="trl", process_timeout=10))
    assert re.search(f"{ONE} hangs.* it was in: step \\d: the reward function", said), said
    assert str(newest(tmp_path / "run")) in said and "process_timeout" in said
    assert said.count("Traceback") <= 1, "torchrun's own"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("exit", "process 0 is gone, through which", marks=pytest.mark.gate),
        ("hang", "hangs: alive"),
    ],
)
def test_without_a_launcher_the_other_one_says_so_too(llama, tmp_path, kind, words):
    """Where the first process is the one, which holds the store and writes the run's folder."""
    values = {**BASE, "model": llama, "output_dir": str(tmp_path / "run"), "process_timeout": 8.0, "report_to": ()}
    values["environment"] = {"FAULT": f"{kind}:0:{IN_STEP_3}"}
    ports, told = children.free_ports(1), [tmp_path / f"told-{rank}" for rank in range(2)]
    pair = [children.start(children.one_of_several, rank, 2, ports, [values], str(told[rank])) for rank in (0, 1)]
    children.wait_for(told[1])
    (end,) = json.loads(told[1].read_text())
    assert end.startswith("TrainerFailed: a process of the run is missing") and words in end
    assert f"the newest checkpoint is {newest(tmp_path / 'run')}" in end
    codes = children.end(pair)
    assert codes == [7 if kind == "exit" else 1, 0], "what hangs is ended by force"


def test_no_process_outlives_its_launcher(llama, tmp_path):
    folder = tmp_path / "run"
    launcher = launched(llama, folder, "slow:0:0", max_steps=10_000)
    workers: list[int] = []
    try:
        children.wait_for(folder / "checkpoints" / "step-000001")
        workers = [int(each) for each in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(workers) >= 2
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + children.SECONDS
        while any(map(runs, workers)):
            assert time.monotonic() < deadline, "an orphan trains on"
            time.sleep(0.1)
        assert f"step-{rows_of(folder)[-1]['step']:06d}" == newest(folder).name, "the last step done is saved"
    finally:
        for pid in filter(runs, workers):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
