"""Files that are there completely or not at all."""

from __future__ import annotations

import os

import pytest

from klamp.training import whole_files
from klamp.training.whole_files import part_of, sync, write_whole


def test_a_file_is_replaced_by_one_that_is_on_the_disk(tmp_path, monkeypatch):
    order, file = [], tmp_path / "a.txt"
    fsync = os.fsync
    monkeypatch.setattr(whole_files.os, "fsync", lambda number: (order.append(file.exists()), fsync(number)))
    write_whole(file, "één")
    assert file.read_text(encoding="utf-8") == "één" and list(tmp_path.iterdir()) == [file]
    assert order == [False, True], "the text before the move, the name after it"


def test_one_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    write_whole(file, "old")

    def full(number):
        raise OSError("no space left")

    monkeypatch.setattr(whole_files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(file, "new")
    assert file.read_text() == "old"


def test_a_folder_is_synced_as_a_file_is(tmp_path):
    sync(tmp_path)
    assert part_of(tmp_path / "b").name == ".b.part"


def test_a_system_that_opens_no_folder_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("Windows refuses that"))
    sync(tmp_path)
