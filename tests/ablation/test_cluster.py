"""Runs on a real Ray cluster of this machine: workers are killed, runs fail and are interrupted, files come back."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ablation import judges
from tests.training.conftest import TINY, stored, tiny_llama
from tests.waiting import wait_for

from klamp.ablation import cluster
from klamp.ablation.cluster import RayExecutor, connected, load_ray, reason_of, sign_of
from klamp.ablation.cluster_worker import RESULTS
from klamp.ablation.executor import Update
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import Outcome, read_outcome
from klamp.ablation.plan import Arm, Run, run_folder
from klamp.errors import ConfigError, TrainingStopped, UnsupportedVersion
from klamp.training.config import TrainConfig

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

JUDGES = Path(judges.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the ablation, which the judges know."""
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def ray_cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two CPUs, with what workers need in their environment."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray writes the token of its cluster
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KLAMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(judges.FOLDER, str(folder))
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A tiny run with one of the judges."""
    model = stored(tiny_llama(), tmp_path_factory.mktemp("llama"))

    def make(name: str, judge: str = "digits", seed: int = 0) -> Run:
        values = {"model": model, "reward": f"{JUDGES}:{judge}", "max_steps": 3, "save_every": 1, "eval_every": 0}
        config = TrainConfig.from_flat({**TINY, "eval_size": 2, **values, "seed": seed})
        return Run(name=name, arm=Arm(name=name, values={"beta": 0.02}), seed=seed, config=config)

    return make


def numbers_of(outcome: Outcome | None) -> dict[str, Any]:
    """What a seed fixes; wall times are not."""
    assert outcome is not None
    assert outcome.state == "done", outcome.error
    numbers = {name: value for name, value in outcome.numbers.items() if name != "seconds"}
    return {"before": outcome.before, "after": outcome.after, "by_step": outcome.by_step, **numbers}


def told_of(told: list[Update], name: str) -> list[Update]:
    return [update for update in told if update.run == name]


@pytest.fixture
def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find neither the ablation's sign in its folder nor the files that runs read."""
    packed = cluster.pack_all

    def elsewhere(*given: Any) -> Any:
        return {key: replace(parcel, path=f"/no/such{parcel.path}") for key, parcel in packed(*given).items()}

    monkeypatch.setattr(cluster, "pack_all", elsewhere)
    monkeypatch.setattr(cluster, "sign_of", lambda folder: f"other-{sign_of(folder)}")


@pytest.mark.usefixtures("ray_cluster", "other_disk")
def test_without_a_shared_disk_a_killed_run_is_done_again_and_a_broken_one_is_not(
    folder: Path, run_of: Callable[..., Run], tmp_path: Path
) -> None:
    killed, broken, told = run_of("killed", "kills_once", 1), run_of("broken", "breaks"), list[Update]()
    RayExecutor("auto", retries=2).run([killed, broken], folder, told.append)

    # another process went on from the checkpoint of the one that was killed, with the same numbers
    own = run_folder(folder, killed)
    outcome = read_outcome(own)
    assert int((folder / "killed").read_text()) != os.getpid()
    perform(killed, tmp_path, lambda update: None)
    assert numbers_of(outcome) == numbers_of(read_outcome(run_folder(tmp_path, killed)))
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    said = told_of(told, "killed")
    assert outcome is not None
    assert (said[-1].state, said[-1].metrics) == ("done", outcome.numbers)
    texts = [update.text for update in said]
    assert [text for text in texts if text] == ["its worker died; attempt 2"]
    again = [u.step for u in said[texts.index("its worker died; attempt 2") + 1 :] if u.state == "running"]
    assert again == [2, 3], "it began after the second step"

    # its small files came back, and its checkpoints did not
    assert {file.name for file in own.iterdir()} == {*RESULTS, "worker.json"} - {"alarms.jsonl"}
    there = Path(json.loads((own / "worker.json").read_text())["folder"])
    assert there != own
    assert (there / "checkpoints" / "step-000003").is_dir()
    shutil.rmtree(there.parent.parent)

    # the other broke by its own fault: once, with its reason
    assert (folder / "breaks").read_text() == "once\n"
    failure = read_outcome(run_folder(folder, broken))
    assert failure is not None
    assert failure.state == "failed"
    assert "the judge is out to lunch" in failure.error
    assert told_of(told, "broken")[-1].state == "failed"


def test_a_worker_that_never_comes_back_is_a_failure_with_rays_reason() -> None:
    import ray.exceptions

    assert reason_of(ray.exceptions.WorkerCrashedError()).startswith("its worker died, and so did those")
    told = reason_of(ray.exceptions.RayTaskError("work", "trace", UnsupportedVersion("another klamp", fix="mend it")))
    assert told == "UnsupportedVersion: another klamp\n  fix: mend it"


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_lets_the_step_end_and_the_run_goes_on_from_there(
    folder: Path, run_of: Callable[..., Run], tmp_path: Path
) -> None:
    run, told = run_of("stopped", "waits", 2), list[Update]()
    before = signal.getsignal(signal.SIGINT)

    def tell(update: Update) -> None:
        told.append(update)
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

    assert not (own / "worker.json").exists(), "on a shared disk nothing travels"

    perform(run, folder, lambda update: None)  # as any executor does
    perform(run, tmp_path, lambda update: None)
    assert numbers_of(read_outcome(own)) == numbers_of(read_outcome(run_folder(tmp_path, run)))


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedVersion, match=r"pip install 'klamp\[ray\]'"):
        load_ray("local")


def test_an_address_that_nothing_answers_at_is_named() -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("could not find any running Ray instance\nmore")

    fake = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    with pytest.raises(ConfigError, match="no Ray cluster answers") as error, connected(fake, "auto"):
        pass
    assert "'auto'" in str(error.value)
    assert "could not find any running Ray instance" in str(error.value)
    assert "more" not in str(error.value)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_host_that_does_not_listen_is_told_before_ray_waits_for_it(address: str) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        is_initialized=lambda: False, init=lambda **given: calls.append(given), shutdown=lambda: None
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConfigError, match="ConnectionRefusedError"), connected(fake, address.format(port)):
            pass
        assert calls == []
        free.listen()
        with connected(fake, address.format(port)):
            assert calls[0]["address"] == address.format(port)
            assert "include_dashboard" not in calls[0], "only for a cluster of our own"


def test_a_cluster_that_was_there_is_left_alone_and_an_own_one_ends() -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        init=lambda **given: calls.append(given),
        shutdown=lambda: calls.append("shutdown"),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    with connected(SimpleNamespace(is_initialized=lambda: True, **vars(fake)), "auto"):
        pass
    assert calls == []
    with connected(SimpleNamespace(is_initialized=lambda: False, **vars(fake)), "local"):
        assert calls[0]["include_dashboard"] is False
        assert calls[0]["log_to_driver"] is False
    assert calls[1:] == ["shutdown"]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_own_cluster_that_would_listen_to_other_machines_is_refused_and_ended() -> None:
    calls: list[str] = []
    fake = SimpleNamespace(
        __version__="99",
        is_initialized=lambda: False,
        init=lambda **_: calls.append("init"),
        shutdown=lambda: calls.append("shutdown"),
        util=SimpleNamespace(get_node_ip_address=lambda: "192.0.2.7"),
    )
    with pytest.raises(ConfigError, match="would listen to other machines") as error, connected(fake, "local"):
        pass
    assert "Ray 99 at 192.0.2.7" in str(error.value)
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("imported", ["import ray", ""], ids=["ray_was_imported", "ray_was_not"])
def test_an_own_cluster_is_reached_from_this_machine_only_and_asks_for_a_token(imported: str, tmp_path: Path) -> None:
    program = f"""{imported}
import json, os
import psutil
from klamp.ablation.cluster import connected, load_ray
ray = load_ray("local")
with connected(ray, "local"):
    ray.get(ray.remote(lambda: None).remote(), timeout=240)
    own = psutil.Process()
    every = [each for process in [own, *own.children(recursive=True)] for each in process.net_connections("inet")]
    found = {{each.laddr.ip.removeprefix("::ffff:") for each in every if each.status == "LISTEN"}}
from ray._private.ray_constants import ENABLE_RAY_CLUSTER
left = [ENABLE_RAY_CLUSTER, os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")]
print(json.dumps([sorted(found), os.environ.get("RAY_AUTH_MODE"), left]))
"""
    removed = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [["127.0.0.1"], "token", [True, None]]
    if find_spec("ray._private.authentication"):  # from 2.52 on
        assert (tmp_path / ".ray" / "auth_token").read_text()


@pytest.mark.parametrize("wrong", [{"cpus_per_run": 0}, {"gpus_per_run": -1}, {"retries": -1}])
def test_impossible_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RayExecutor(**wrong)


@pytest.mark.usefixtures("ray_cluster")
def test_a_machine_without_gpus_says_so_instead_of_waiting(folder: Path, run_of: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match="no run fits on this machine"):
        RayExecutor(gpus_per_run=1).run([run_of("never")], folder, lambda update: None)


def test_it_says_where_it_runs() -> None:
    assert RayExecutor().describe() == "a Ray cluster on this machine, 1 CPU per run"
    where = RayExecutor("ray://head:10001", cpus_per_run=4, gpus_per_run=0.5).describe()
    assert where == "the Ray cluster at ray://head:10001, 4 CPU and 0.5 GPU per run"
