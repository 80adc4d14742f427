"""The cache of models: a folder is there as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import ModelError
from klamp.tasks.cache import cache_root, store, without_bars


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

    store(folder, write)
    assert (folder / "weights").read_text() == "all of them"
    assert [each.name for each in folder.parent.iterdir()] == ["model"]


def test_what_is_killed_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def write(empty: Path) -> None:
        (empty / "weights").write_text("half of th")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []


def test_the_quicker_process_wins(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(empty: Path) -> None:
        (empty / "weights").write_text("ours")
        folder.mkdir()
        (folder / "weights").write_text("theirs")

    store(folder, write)
    assert (folder / "weights").read_text() == "theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_cache_that_cannot_be_written_is_found_out_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        store(tmp_path / "file" / "model", lambda empty: pytest.fail("there was work"))
    assert "KLAMP_CACHE" in str(caught.value)


def test_bars_come_back_as_they_were() -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    try:
        for given in (True, False):
            (logging.enable_progress_bar if given else logging.disable_progress_bar)()
            with without_bars():
                assert not logging.is_progress_bar_enabled()
            assert logging.is_progress_bar_enabled() == given
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
