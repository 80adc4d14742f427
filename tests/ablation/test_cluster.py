"""Runs on a real Ray cluster of this machine: spread, recorded as failed, continued."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.ablation import rewards
from tests.training.conftest import TINY, stored, tiny_llama
from tests.waiting import wait_for

from klamp.errors import ConfigError, RunFolderError, TrainingStopped, UnsupportedVersion
from klamp.lab.ablate.execute import RayExecutor, execute, load_ray, work
from klamp.lab.ablate.one_run import perform
from klamp.lab.ablate.plan import Arm, Plan, Run, run_folder, runs
from klamp.lab.ablate.results import read_outcome

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

REWARDS = Path(rewards.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def ray_cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two CPUs, with what workers need in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray writes the token of its cluster
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KLAMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(rewards.FOLDER, str(folder))
        ray = load_ray("local")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def base(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = stored(tiny_llama(), tmp_path_factory.mktemp("llama"))
    return {**TINY, "eval_size": 2, "model": model, "max_steps": 3, "save_every": 1, "eval_every": 0}


@pytest.fixture(scope="module")
def run_of(base: dict[str, Any]) -> Callable[..., Run]:
    def make(name: str, judge: str = "digits", seed: int = 0) -> Run:
        return runs(Plan(base={**base, "reward": f"{REWARDS}:{judge}"}, arms=(Arm(name=name),), seeds=(seed,)))[0]

    return make


def test_a_broken_run_is_recorded_and_not_repeated(run_of: Callable[..., Run], folder: Path) -> None:
    broken = run_of("broken", "breaks")
    RayExecutor(address="auto").run([broken], folder, lambda *_: None)
    assert (folder / "breaks").read_text() == "once\n", "it would fail again"
    failure = read_outcome(run_folder(folder, broken))
    assert failure is not None
    assert failure.state == "failed" and "the judge is out to lunch" in failure.error


def test_a_killed_run_goes_on_from_its_checkpoint(folder: Path, run_of: Callable[..., Run], tmp_path: Path) -> None:
    killed = run_of("killed", "kills_once", 1)
    RayExecutor().run([killed], folder, lambda *_: None)
    assert int((folder / "killed").read_text()) != os.getpid()
    assert read_outcome(run_folder(folder, killed)) == perform(killed, tmp_path)


def test_ctrl_c_lets_the_step_end_and_the_run_goes_on(folder: Path, run_of: Callable[..., Run], tmp_path: Path) -> None:
    run = run_of("stopped", "waits", 2)
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        wait_for(folder / "waiting")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(TrainingStopped) as stopped:
        RayExecutor().run([run], folder, lambda *_: None)
    assert isinstance(stopped.value.__cause__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    own = run_folder(folder, run)
    assert read_outcome(own) is None
    saved = sorted(file.name for file in (own / "checkpoints").iterdir())
    assert saved == ["step-000001", "step-000002"], "the step under way was ended and saved"
    RayExecutor().run([run], folder, lambda *_: None)
    assert read_outcome(own) == perform(run, tmp_path)


def test_an_ablation_is_spread_and_goes_on_with_what_is_missing(base: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(base={**base, "reward": f"{REWARDS}:digits"}, seeds=(0, 1))
    first, second = (run.name for run in runs(plan))
    result = execute(plan, tmp_path / "out", RayExecutor())
    assert [outcome.state for outcome in result.outcomes] == ["done", "done"]
    (tmp_path / "out" / "runs" / second / "outcome.json").unlink()
    told = []
    execute(plan, tmp_path / "out", RayExecutor(), tell=lambda run, outcome: told.append((run.name, outcome is None)))
    assert told == [(first, False), (second, True), (second, False)]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedVersion, match=r"pip install .*\[ray\]'"):
        load_ray("local")


def test_an_own_cluster_is_reached_from_this_machine_only_and_asks_for_a_token(tmp_path: Path) -> None:
    program = """
import json, os
import psutil
from klamp.lab.ablate.execute import connected, load_ray
ray = load_ray("local")
with connected(ray, "local"):
    ray.get(ray.remote(lambda: None).remote(), timeout=240)
    own = psutil.Process()
    every = [each for process in [own, *own.children(recursive=True)] for each in process.net_connections("inet")]
    found = {each.laddr.ip.removeprefix("::ffff:") for each in every if each.status == "LISTEN"}
print(json.dumps([sorted(found), os.environ.get("RAY_AUTH_MODE")]))
"""
    ours = ("RAY_AUTH_", "RAY_ENABLE_WINDOWS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [["127.0.0.1"], "token"]
    if find_spec("ray._private.authentication"):  # from 2.52 on
        assert (tmp_path / ".ray" / "auth_token").read_text()


def test_a_machine_without_gpus_says_so_instead_of_waiting(folder: Path, run_of: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match="no run fits on this machine"):
        RayExecutor(gpus_per_run=1).run([run_of("never")], folder, lambda *_: None)


def test_a_worker_without_the_folder_is_refused(run_of: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not see the folder"):
        work(run_of("any"), tmp_path / "elsewhere")
