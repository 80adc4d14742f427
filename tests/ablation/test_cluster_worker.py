"""A worker's side of the cluster, without one: folders, versions, what is reported, what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from klamp.ablation.cluster import sign_of
from klamp.ablation.cluster_worker import SIGN, Post, Result, job_of, keep_result, work, working_folder
from klamp.ablation.executor import Update
from klamp.ablation.plan import Arm, Run
from klamp.errors import UnsupportedVersion
from klamp.training.config import TrainConfig

RUN = Run(name="any", arm=Arm(name="any"), seed=0, config=TrainConfig())


def test_what_was_reported_is_taken_once_and_attempts_are_counted() -> None:
    post = Post()
    post.begin("a")
    post.put(Update(run="a", state="running", step=1))
    assert [(u.run, u.step, u.text) for u in post.take()] == [("a", 0, ""), ("a", 1, "")]
    assert post.take() == []
    post.begin("b")
    post.begin("a")
    assert [(u.run, u.text) for u in post.take()] == [("b", ""), ("a", "its worker died; attempt 2")]


def test_only_known_names_are_written(tmp_path: Path) -> None:
    files = {"outcome.json": b"{}", "../escape": b"x", "/tmp/escape": b"x", "checkpoints/x.pt": b"x", "evil.py": b"x"}
    keep_result(Result(host="h", folder="/there", files=files), tmp_path / "runs" / "a")
    written = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert written == ["runs/a/outcome.json", "runs/a/worker.json"]


def test_a_worker_takes_the_folder_only_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    sign = sign_of(tmp_path)
    assert sign_of(tmp_path) == sign, "written once"
    job = job_of(RUN, folder=tmp_path, sign=sign, parcels={}, threads=1)
    assert working_folder(job) == (tmp_path, True)
    (tmp_path / SIGN).write_text("another ablation")
    own, shared = working_folder(job)
    assert not shared
    assert own.parent == tmp_path / "local"
    assert own.stat().st_mode & 0o077 == 0, "nobody else reads it"
    assert working_folder(job) == (own, False), "found again after the worker died"


def test_another_version_on_the_worker_is_refused(tmp_path: Path) -> None:
    job = job_of(RUN, folder=tmp_path, sign="s", parcels={}, threads=1)
    with pytest.raises(UnsupportedVersion, match="another version of klamp"):
        work(replace(job, version="0.0.0"), None)
