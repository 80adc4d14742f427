"""The folder of a run: the next free one, or the one asked for if free; its lock; files that are whole."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
from tests.training.conftest import AfterStep, refused
from tests.waiting import wait_for

from klamp.errors import RunFolderError
from klamp.lab import folders
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import LOCK, check_folder, free_folder, held, make_folder, opened_folder, run_folder
from klamp.names import CONFIG


def test_folders_are_numbered_and_never_taken_twice(tmp_path):
    assert free_folder(tmp_path, "a") == tmp_path / "a-001"
    (tmp_path / "a-001").mkdir()
    (tmp_path / "a-002").write_text("")
    (tmp_path / "a-004").mkdir()
    assert free_folder(tmp_path, "a") == tmp_path / "a-003"
    (tmp_path / "b-001").symlink_to(tmp_path / "nowhere")
    assert free_folder(tmp_path, "b") == tmp_path / "b-002"


@pytest.mark.parametrize(
    ("task", "name"), [("arithmetic", "arithmetic"), ("my.tasks:chess", "chess"), ("my/data.jsonl", "data")]
)
def test_a_run_without_output_dir_is_named_after_its_task(tmp_path, monkeypatch, task, name):
    monkeypatch.chdir(tmp_path)
    assert run_folder(TrainConfig.from_flat({"task": task})) == Path("runs") / f"{name}-001"
    assert not (tmp_path / "runs").exists(), "nothing is made yet"


def with_file(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / name).write_text("")
    return folder


def test_a_folder_in_use_and_nothing_to_resume_are_refused_with_the_ways_out(tmp_path):
    run, other = with_file(tmp_path / "run", CONFIG), with_file(tmp_path / "other", "thesis.tex")
    with refused(RunFolderError, "(?s)holds another run.*--output_dir.*--resume") as caught:
        check_folder(run, resume=False)
    assert caught.value.got == str(run)
    check_folder(run, resume=True)
    for folder, words in ((other, "holds other files"), (other / "thesis.tex", "is a file")):
        with refused(RunFolderError, words):
            check_folder(folder, resume=False)
    for folder in (other, tmp_path / "missing"):
        with refused(RunFolderError, f"(?s)no run to continue.*{CONFIG}"):
            check_folder(folder, resume=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder, words in (
        (tmp_path / "link", "a link that leads nowhere"),
        ("a\0b", "(?s)cannot be written.*null byte"),
    ):
        with refused(RunFolderError, words):
            make_folder(TrainConfig.from_flat({"output_dir": str(folder)}))


def test_a_folder_that_nobody_may_make_is_refused_before_it_is_made(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    for folder, words in ((tmp_path / "a" / "run", "is a file"), (tmp_path / "run", "not yours")):
        with refused(RunFolderError, f"(?s)cannot be written.*{words}") as caught:
            run_folder(TrainConfig.from_flat({"output_dir": str(folder)}))
        assert caught.value.got == str(folder)
        monkeypatch.setattr(os, "access", lambda path, how: path != tmp_path)


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_run_leaves_that_was_killed_while_it_was_loading_is_in_nobodys_way(tmp_path, resume):
    for name in (".lock", ".config.yaml.part", "log.txt"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    check_folder(tmp_path, resume=resume)
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    with pytest.raises(RunFolderError, match="no run to continue" if resume else "other files"):
        check_folder(tmp_path, resume=resume)


def test_the_folder_is_made_and_a_given_one_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.from_flat({"task": "arithmetic"})
    assert make_folder(config) == (Path("runs/arithmetic-001"), True)
    assert make_folder(config) == (Path("runs/arithmetic-002"), True)
    given = TrainConfig.from_flat({"output_dir": str(tmp_path / "a" / "b")})
    assert [make_folder(given) for _ in range(2)] == [(tmp_path / "a" / "b", True), (tmp_path / "a" / "b", False)]


def test_checkpoints_are_found_whoever_wrote_them_oldest_first(tmp_path):
    names = ["step-000002", "step-000010", "checkpoint-4", "checkpoint-30", "global_step_5"]
    for name in (*names, "something"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [each.name for each in folders.checkpoint_folders(tmp_path)] == [names[i] for i in (0, 2, 4, 1, 3)]
    assert folders.checkpoint_folders(tmp_path / "nowhere") == []


def test_a_second_one_is_refused_until_the_first_is_gone(tmp_path):
    child = os.fork()
    if not child:
        with held(tmp_path, by="klamp train"):
            (tmp_path / "ready").touch()
            time.sleep(240)
        os._exit(0)
    wait_for(tmp_path / "ready")
    try:
        with refused(RunFolderError, "(?s)another process works.*--output_dir") as caught, held(tmp_path, by="me"):
            pass
        assert caught.value.got == str(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    with held(tmp_path, by="me"):
        assert (tmp_path / LOCK).exists(), "the dead hold nothing"
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_is_refused_in_words(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with refused(RunFolderError, "(?s)cannot be written.*No locks.*--output_dir"), held(tmp_path, by="x"):
        pass


def test_a_file_is_replaced_by_one_that_is_on_the_disk(tmp_path, monkeypatch):
    order, file = [], tmp_path / "a.txt"
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (order.append(file.exists()), fsync(number)))
    folders.write_whole(file, "één")
    assert file.read_text(encoding="utf-8") == "één" and list(tmp_path.iterdir()) == [file]
    assert order == [False, True], "the text before the move, the name after it"


def test_a_folder_that_holds_nothing_in_the_end_goes(config_of, tmp_path):
    with opened_folder(config_of()) as folder:
        assert folder == tmp_path / "run" and (folder / LOCK).exists()
    assert not folder.exists()
    with opened_folder(config_of()) as folder:
        (folder / "config.yaml").touch()
    assert [each.name for each in folder.iterdir()] == ["config.yaml"]


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
    tried = []

    def second_run():
        for changes in ({}, {"resume": True}):
            with pytest.raises(RunFolderError, match="another process works"):
                train_run(config_of(**changes))
            tried.append(changes)

    train_run(config_of(max_steps=2, save_every=1, eval_size=1), [AfterStep(2, second_run)])
    assert len(tried) == 2 and not (tmp_path / "run" / LOCK).exists()
