"""TensorBoard folders, written by torch's own writer with the names of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from klamp.diagnostics.doctor import examine
from klamp.errors import DataError
from klamp.records import read_record


def write(folder: Path, **curves: list[float]) -> Path:
    with SummaryWriter(str(folder)) as writer:
        for name, curve in curves.items():
            for step, value in enumerate(curve, start=1):
                writer.add_scalar(name.replace("__", "/"), value, step)
    return folder


def test_verls_names(tmp_path: Path) -> None:
    kl = [0.0, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5]
    folder = write(
        tmp_path / "verl",
        actor__kl_loss=kl,
        critic__score__mean=[0.5] * 7,
        rollout_corr__k3_kl=[0.001] * 6 + [0.5],
        response_length__clip_ratio=[0.0, 0.0, 0.0, 0.5, 0.5, 0.9, 0.9],
        critic__advantages__max=[2.0] * 7,
        **{"val-core__gsm8k__acc__mean@8": [0.8, 0.6]},
    )
    for path in (tmp_path, next(folder.glob("events*"))):
        history = read_record(path)
        assert [row.metrics["kl/k3"] for row in history.rows] == pytest.approx(kl)
        names = [finding.alarm.name for finding in examine(history).findings]
        assert set(names) == {"retention", "truncated", "kl-spike", "sampler-mismatch"}


def test_several_runs_below_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, kl=[0.1])
    with pytest.raises(DataError, match="several TensorBoard runs") as caught:
        read_record(tmp_path)
    assert caught.value.why == "a, b"


def test_no_scalars(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "hello")
    with pytest.raises(DataError, match="no scalars"):
        read_record(tmp_path)


def test_names_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, mine__kl=[0.0, 0.25], kl=[7.0, 7.0])
    for path in (tmp_path, next(tmp_path.glob("events*"))):
        history = read_record(path, {"kl/k3": "mine/kl"})
        assert [dict(row.metrics) for row in history.rows] == [{"kl/k3": 0.0}, {"kl/k3": 0.25}]
        with pytest.raises(DataError, match="no row of the record has a number called 'kl/mine'") as caught:
            read_record(path, {"kl/k3": "kl/mine"})
        assert caught.value.why == "it has kl, mine/kl"
