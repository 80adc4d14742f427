"""Runs on a real Ray cluster of this machine: spread, recorded as failed, continued."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.ablation import rewards
from tests.training.conftest import TINY, stored, tiny_llama
from tests.waiting import wait_for

from klamp import __version__
from klamp.ablation.cluster import RayExecutor, connected, load_ray, work
from klamp.ablation.execute import execute
from klamp.ablation.executor import Update
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import Outcome, read_outcome
from klamp.ablation.plan import PLAN, Arm, Plan, Run, plain_plan, run_folder, runs
from klamp.errors import ConfigError, RunFolderError, TrainingStopped, UnsupportedVersion

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

REWARDS = Path(rewards.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the ablation, which the rewards know."""
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def ray_cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two CPUs, with what workers need in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray writes the token of its cluster
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KLAMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(rewards.FOLDER, str(folder))
        ray = load_ray("local")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The fields of a tiny run."""
    model = stored(tiny_llama(), tmp_path_factory.mktemp("llama"))
    return {**TINY, "eval_size": 2, "model": model, "max_steps": 3, "save_every": 1, "eval_every": 0}


@pytest.fixture(scope="module")
def run_of(base: dict[str, Any]) -> Callable[..., Run]:
    """A tiny run with one of the rewards; where a folder is given, the plan of this run stands there."""

    def make(name: str, judge: str = "digits", seed: int = 0, folder: Path | None = None) -> Run:
        plan = Plan(base={**base, "reward": f"{REWARDS}:{judge}"}, arms=(Arm(name=name),), seeds=(seed,))
        if folder is not None:
            (folder / PLAN).write_text(yaml.safe_dump(plain_plan(plan)))
        (run,) = runs(plan)
        return run

    return make


def numbers_of(outcome: Outcome | None) -> dict[str, Any]:
    """What a seed fixes; wall times are not."""
    assert outcome is not None
    assert outcome.state == "done", outcome.error
    numbers = {name: value for name, value in outcome.numbers.items() if name != "seconds"}
    return {"before": outcome.before, "after": outcome.after, **numbers}


@pytest.mark.usefixtures("ray_cluster")
def test_runs_leave_their_outcomes_and_a_broken_run_is_named(run_of: Callable[..., Run], folder: Path) -> None:
    broken, told = run_of("broken", "breaks", folder=folder), list[Update]()
    RayExecutor(address="auto").run([broken], folder, told.append)
    assert (folder / "breaks").read_text() == "once\n", "it would fail again"
    failure = read_outcome(run_folder(folder, broken))
    assert failure is not None
    assert failure.state == "failed" and "the judge is out to lunch" in failure.error
    assert told[-1].state == "failed"


def test_a_worker_without_the_folder_is_refused(run_of: Callable[..., Run], tmp_path: Path) -> None:
    run = run_of("any", folder=tmp_path)
    for folder, plan in ((tmp_path / "elsewhere", "plan"), (tmp_path, "another plan")):
        with pytest.raises(RunFolderError, match="does not see the folder"):
            work(run, folder, plan, __version__)


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_worker_is_killed_goes_on_from_its_checkpoint(
    folder: Path, run_of: Callable[..., Run], tmp_path: Path
) -> None:
    killed, told = run_of("killed", "kills_once", 1, folder), list[Update]()
    RayExecutor().run([killed], folder, told.append)
    assert int((folder / "killed").read_text()) != os.getpid()
    perform(killed, tmp_path)
    assert numbers_of(read_outcome(run_folder(folder, killed))) == numbers_of(
        read_outcome(run_folder(tmp_path, killed))
    )
    lines = (run_folder(folder, killed) / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if "reward" in line] == [1, 2, 3]


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_lets_the_step_end_and_the_run_goes_on_from_there(
    folder: Path, run_of: Callable[..., Run], tmp_path: Path
) -> None:
    run = run_of("stopped", "waits", 2, folder)
    before = signal.getsignal(signal.SIGINT)

    def tell(update: Update) -> None:
        if update.step == 1 and update.metrics:
            wait_for(folder / "waiting")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingStopped, match="1 of 1 runs not done") as stopped:
        RayExecutor().run([run], folder, tell)
    assert isinstance(stopped.value.__cause__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    own = run_folder(folder, run)
    assert read_outcome(own) is None
    saved = sorted(file.name for file in (own / "checkpoints").iterdir())
    assert saved == ["step-000001", "step-000002"], "the step under way was ended and saved"
    RayExecutor().run([run], folder, lambda update: None)
    perform(run, tmp_path)
    assert numbers_of(read_outcome(own)) == numbers_of(read_outcome(run_folder(tmp_path, run)))


@pytest.mark.usefixtures("ray_cluster")
def test_an_ablation_is_spread_and_goes_on_with_what_is_missing(base: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(base={**base, "reward": f"{REWARDS}:digits"}, seeds=(0, 1))
    told = list[Update]()
    first, second = (run.name for run in runs(plan))
    result = execute(plan, tmp_path / "out", RayExecutor(), tell=told.append)
    assert [outcome.state for outcome in result.outcomes] == ["done", "done"]

    (tmp_path / "out" / "runs" / second / "outcome.json").unlink()
    told.clear()
    execute(plan, tmp_path / "out", RayExecutor(), tell=told.append)
    assert {u.run for u in told if u.state == "kept"} == {first} and {u.run for u in told[2:]} == {second}


def test_another_version_on_the_worker_is_refused(run_of: Callable[..., Run]) -> None:
    with pytest.raises(UnsupportedVersion, match="another version of klamp"):
        work(run_of("any"), Path("/there"), "", "0.0.0")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedVersion, match=r"pip install .*\[ray\]'"):
        load_ray("local")


def test_an_address_that_nothing_answers_at_is_named() -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("could not find any running Ray instance\nmore")

    fake = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    with pytest.raises(ConfigError, match="no Ray cluster can be used") as error, connected(fake, "auto"):
        pass
    assert "'auto'" in str(error.value)
    assert "could not find any running Ray instance" in str(error.value)
    assert "more" not in str(error.value)


def fake_ray() -> tuple[Any, list[Any]]:
    """A Ray that notes its calls, and the calls."""
    calls: list[Any] = []
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **given: calls.append(given),
        shutdown=lambda: calls.append("shutdown"),
    )
    return fake, calls


def test_a_cluster_that_was_there_is_left_alone_and_an_own_one_ends() -> None:
    fake, calls = fake_ray()
    with connected(SimpleNamespace(**{**vars(fake), "is_initialized": lambda: True}), "auto"):
        pass
    assert calls == []
    with connected(fake, "local"):
        assert calls[0]["include_dashboard"] is False and "runtime_env" not in calls[0]
    assert calls[1:] == ["shutdown"]
    with connected(fake, "auto"):
        assert calls[2]["runtime_env"]["working_dir"] == "." and "include_dashboard" not in calls[2]


def test_an_own_cluster_is_reached_from_this_machine_only_and_asks_for_a_token(tmp_path: Path) -> None:
    program = """
import json, os
import psutil
from klamp.ablation.cluster import connected, load_ray
ray = load_ray("local")
with connected(ray, "local"):
    ray.get(ray.remote(lambda: None).remote(), timeout=240)
    own = psutil.Process()
    every = [each for process in [own, *own.children(recursive=True)] for each in process.net_connections("inet")]
    found = {each.laddr.ip.removeprefix("::ffff:") for each in every if each.status == "LISTEN"}
print(json.dumps([sorted(found), os.environ.get("RAY_AUTH_MODE")]))
"""
    removed = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [["127.0.0.1"], "token"]
    if find_spec("ray._private.authentication"):  # from 2.52 on
        assert (tmp_path / ".ray" / "auth_token").read_text()


@pytest.mark.parametrize("wrong", [{"cpus_per_run": 0}, {"gpus_per_run": -1}])
def test_impossible_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RayExecutor(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("ray_cluster")
def test_a_machine_without_gpus_says_so_instead_of_waiting(folder: Path, run_of: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match="no run fits on this machine"):
        RayExecutor(gpus_per_run=1).run([run_of("never")], folder, lambda update: None)
