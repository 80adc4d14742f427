"""The cache of models: a folder is there as a whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest
import torch
from safetensors.torch import save_file

from klamp.errors import ModelError
from klamp.tasks.cache import cache_root, stored


def test_the_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KLAMP_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("KLAMP_CACHE")
    assert cache_root() == Path.home() / ".cache" / "klamp"


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"

    def write(empty: Path) -> None:
        assert list(empty.iterdir()) == [] and not folder.exists()
        (empty / "weights").write_text("all of them")

    assert stored(folder, write) == stored(folder, lambda _: pytest.fail("it is there")) == folder
    assert (folder / "weights").read_text() == "all of them"
    assert [each.name for each in folder.parent.iterdir()] == ["model"]


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_model_is_as_readable_as_other_files(tmp_path: Path, umask: int) -> None:
    def write(empty: Path) -> None:
        save_file({"weight": torch.zeros(1)}, empty / "model.safetensors")
        (empty / "inner").mkdir(0o700)
        (empty / "program").touch(0o700)
        (empty / "inner" / "link").symlink_to("/proc/version")

    stored(tmp_path / "model", write)
    found = {path.relative_to(tmp_path).as_posix(): S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    del found["model/inner/link"]
    file, folder = 0o666 & ~umask, 0o777 & ~umask
    assert found == {
        "model": folder,
        "model/inner": folder,
        "model/model.safetensors": file,
        "model/program": file | 0o700,
    }


def test_what_is_killed_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def write(empty: Path) -> None:
        (empty / "weights").write_text("half of th")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []


def test_the_quicker_process_wins(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(empty: Path) -> None:
        (empty / "weights").write_text("ours")
        folder.mkdir()
        (folder / "weights").write_text("theirs")

    stored(folder, write)
    assert (folder / "weights").read_text() == "theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_cache_that_cannot_be_written_is_found_out_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        stored(tmp_path / "file" / "model", lambda empty: pytest.fail("there was work"))
    assert "KLAMP_CACHE" in str(caught.value)
