"""The folder of a run is one run's alone, from before it is loaded to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from klamp.errors import ModelError, RunFolderError
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig
from klamp.training.folders import LOCK
from klamp.training.observers import Observer
from klamp.training.setup import opened_folder


def test_a_folder_that_holds_nothing_in_the_end_goes(config_of, tmp_path):
    with opened_folder(config_of()) as folder:
        assert folder == tmp_path / "run" and (folder / LOCK).exists()
    assert not folder.exists()
    with opened_folder(config_of()) as folder:
        (folder / "config.yaml").touch()
    assert [each.name for each in folder.iterdir()] == ["config.yaml"]


def test_runs_that_start_at_once_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.from_flat({"task": "arithmetic", "cpu": True})
    with opened_folder(config) as one, opened_folder(config) as other:
        assert (one, other) == (Path("runs/arithmetic-001"), Path("runs/arithmetic-002"))


def test_one_that_is_faster_by_a_hair_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mkdir, made = os.mkdir, []

    def slow(path, *args, **kwargs):
        if Path(path).name == "arithmetic-001" and not made:
            made.append(path)
            mkdir(path, *args, **kwargs)  # another process does
        mkdir(path, *args, **kwargs)

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(os, "mkdir", slow)
    with opened_folder(TrainConfig.from_flat({"task": "arithmetic", "cpu": True})) as folder:
        assert folder == Path("runs/arithmetic-002")


def test_a_run_under_way_is_left_alone(config_of, tmp_path):
    class Second(Observer):
        refused = ()

        def on_step(self, step, metrics):
            for changes in ({}, {"resume": True}):
                with pytest.raises(RunFolderError, match="another klamp train works") as caught:
                    train_run(config_of(**changes))
                assert f"process {os.getpid()} on" in caught.value.got
                self.refused += (step,)

    second = Second()
    train_run(config_of(max_steps=2, save_every=1), [second])
    assert second.refused == (1, 1, 2, 2) and not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_is_refused_leaves_no_folder(config_of, tmp_path):
    with pytest.raises(ModelError):
        train_run(config_of(model=str(tmp_path / "nothing")))
    assert not (tmp_path / "run").exists()
