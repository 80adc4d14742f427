"""Paths that any process finds, and the step of verl's newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from klamp.training.in_verl.layout import Layout


def test_every_path_is_absolute_and_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [path for path in vars(Layout(Path("runs/one"))).values() if isinstance(path, Path)]
    assert len(paths) > 8
    assert all(path.is_relative_to(tmp_path / "runs" / "one") for path in paths)


def test_the_newest_checkpoint_is_what_verl_says_last(tmp_path):
    layout = Layout(tmp_path)
    assert layout.newest_step() == 0
    layout.checkpoint(4).mkdir(parents=True)
    assert layout.newest_step() == 0, "it may still be written"
    for text, step in (("", 0), ("4", 4), ("12\n", 12)):
        layout.newest.write_text(text)
        assert layout.newest_step() == step
