"""The folder of a run: the next free one, or the one asked for if no other run is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import RunFolderError
from klamp.training.config import TrainConfig
from klamp.training.folders import CONFIG, check_folder, checkpoint_folders, free_folder, make_folder, run_folder


def test_folders_are_numbered_and_never_taken_twice(tmp_path):
    assert free_folder(tmp_path, "a") == tmp_path / "a-001"
    (tmp_path / "a-001").mkdir()
    (tmp_path / "a-002").write_text("")
    (tmp_path / "a-004").mkdir()
    assert free_folder(tmp_path, "a") == tmp_path / "a-003"
    (tmp_path / "b-001").symlink_to(tmp_path / "nowhere")
    assert free_folder(tmp_path, "b") == tmp_path / "b-002"


@pytest.mark.parametrize(
    ("task", "name"),
    [("arithmetic", "arithmetic"), ("reasoning_gym:chain_sum", "reasoning_gym-chain_sum"), ("my/data.jsonl", "data")],
)
def test_a_run_without_output_dir_is_named_after_its_task(tmp_path, monkeypatch, task, name):
    monkeypatch.chdir(tmp_path)
    assert run_folder(TrainConfig.from_flat({"task": task})) == Path("runs") / f"{name}-001"
    assert not (tmp_path / "runs").exists(), "nothing is made yet"
    (tmp_path / "runs" / f"{name}-001").mkdir(parents=True)
    assert run_folder(TrainConfig.from_flat({"task": task})) == Path("runs") / f"{name}-002"


def held(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / name).write_text("")
    return folder


def test_another_runs_folder_is_refused_with_the_ways_out(tmp_path):
    folder = held(tmp_path / "run", CONFIG)
    with pytest.raises(RunFolderError, match="holds another run") as caught:
        check_folder(folder, resume=False)
    assert caught.value.got == str(folder) and caught.value.why
    assert "--resume" in caught.value.fix and "--output_dir" in caught.value.fix
    check_folder(folder, resume=True)


def test_other_files_a_file_and_nothing_to_resume_are_refused(tmp_path):
    other = held(tmp_path / "other", "thesis.tex")
    with pytest.raises(RunFolderError, match="holds other files"):
        check_folder(other, resume=False)
    with pytest.raises(RunFolderError, match="is a file") as caught:
        check_folder(other / "thesis.tex", resume=False)
    assert caught.value.got and caught.value.why and caught.value.fix
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="a link that leads nowhere"):
        make_folder(TrainConfig.from_flat({"output_dir": str(tmp_path / "link")}))
    with pytest.raises(RunFolderError, match=r"(?s)cannot be written.*null byte"):
        make_folder(TrainConfig.from_flat({"output_dir": f"{tmp_path}/a\0b"}))
    for folder in (other, tmp_path / "missing"):
        with pytest.raises(RunFolderError, match="no run to continue") as caught:
            check_folder(folder, resume=True)
        assert CONFIG in caught.value.why and caught.value.fix


def test_an_empty_or_missing_folder_is_fine(tmp_path):
    check_folder(tmp_path, resume=False)
    check_folder(tmp_path / "missing", resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_run_leaves_that_was_killed_while_it_was_loading_is_in_nobodys_way(tmp_path, resume):
    for name in (".lock", ".config.yaml.part", "run.json"):
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


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(RunFolderError, match=r"(?s)cannot be written.*no space"):
        make_folder(TrainConfig.from_flat({"output_dir": str(tmp_path / "a")}))


def test_a_folder_below_a_file_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="(?s)cannot be written.*is a file"):
        check_folder(tmp_path / "file" / "run", resume=False)
    check_folder(tmp_path / "new" / "run", resume=False)
    assert not (tmp_path / "new").exists()


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("klamp.training.folders.os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(RunFolderError, match="no permission"):
        check_folder(tmp_path / "new" / "run", resume=False)


def test_checkpoints_are_found_whoever_wrote_them_oldest_first(tmp_path):
    names = ["step-000002", "step-000010", "checkpoint-4", "checkpoint-30", "global_step_5"]
    for name in (*names, "something"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [each.name for each in checkpoint_folders(tmp_path)] == [names[i] for i in (0, 2, 4, 1, 3)]
    assert checkpoint_folders(tmp_path / "nowhere") == []
