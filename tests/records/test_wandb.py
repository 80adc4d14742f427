"""W&B offline runs, written by the real wandb."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from klamp.diagnostics.doctor import examine
from klamp.errors import DataError
from klamp.records import read_record
from klamp.records.logs import BLOCK, FILE_HEADER, FRAME, MAGIC, frames, read_wandb


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run with TRL's names, long enough to fill several blocks of its file."""
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    run = wandb.init(
        mode="offline",
        project="klamp",
        dir=str(folder),
        config={"beta": 0.04, "loss_type": "dr_grpo", "scale_rewards": "group"},
        settings=wandb.Settings(console="off", x_disable_stats=True),
    )
    for step in range(1, 61):
        run.log({"train/global_step": step, "train/kl": 0.001 * step, "train/rewards/math_verify/mean": 0.5})
        run.log({"train/global_step": step, "train/grad_norm": 1e5 if step == 30 else 1.0, "note": "x" * 1000})
    run.log({"train/global_step": 60, "eval/reward": 0.25, "eval/runtime": float("nan")})
    run.finish()
    wandb.teardown()  # its service has written everything
    return folder


def test_an_offline_run(wandb_folder: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 2 * BLOCK
    for path in (wandb_folder, wandb_folder / "wandb", file.parent, file):
        history = read_record(path)
        assert [row.step for row in history.rows] == list(range(1, 61))
        assert [row.metrics["kl/k3"] for row in history.rows] == pytest.approx([0.001 * i for i in range(1, 61)])
        assert (history.settings.beta, history.settings.loss_type) == (0.04, "dr_grpo")
        assert [row.metrics for row in history.evaluations] == [{"reward": 0.25}]
    alarms = {f.alarm.name: f.first_step for f in examine(history).findings}
    assert alarms == {"step-zero-kl": 1, "dr-grpo-with-kl": 1, "huge-values": 30}


def test_names_of_ones_own(wandb_folder: Path) -> None:
    rows = read_record(wandb_folder, {"kl/k1": "train/kl"}).rows
    assert [row.metrics["kl/k1"] for row in rows] == pytest.approx([0.001 * i for i in range(1, 61)])
    assert not any("kl/k3" in row.metrics for row in rows)
    with pytest.raises(DataError, match="no row of the record has a number called 'note'"):
        read_record(wandb_folder, {"kl/k1": "note"})


def test_a_run_that_was_killed_reads_up_to_there(wandb_folder: Path, tmp_path: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    cut = tmp_path / "run.wandb"
    cut.write_bytes(data[: len(data) // 2])
    rows = read_wandb(cut).rows
    assert 10 < len(rows) < 60
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))


def test_records_are_pieced_together_over_blocks(tmp_path: Path) -> None:
    """A block ends with fewer bytes than a frame's head takes: they are zeros; the next record is in two parts."""

    def frame(data: bytes, kind: int) -> bytes:
        return FRAME.pack(0, len(data), kind) + data

    first = frame(b"a" * (BLOCK - FILE_HEADER - FRAME.size - 3), 1)
    second = frame(b"b" * (BLOCK - FRAME.size), 2) + frame(b"c" * 10, 4)
    file = tmp_path / "run.wandb"
    file.write_bytes(MAGIC + b"\0" * (FILE_HEADER - len(MAGIC)) + first + b"\0" * 3 + second + frame(b"d", 1))
    assert [(len(data), data[:1], data[-1:]) for data in frames(file)] == [
        (BLOCK - FILE_HEADER - FRAME.size - 3, b"a", b"a"),
        (BLOCK - FRAME.size + 10, b"b", b"c"),
        (1, b"d", b"d"),
    ]


def test_several_runs_in_one_folder_are_not_mixed(wandb_folder: Path, tmp_path: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    for name in ("offline-run-a", "offline-run-b"):
        (tmp_path / name).mkdir()
        os.link(file, tmp_path / name / "run.wandb")
    with pytest.raises(DataError, match="several W&B runs"):
        read_record(tmp_path)
