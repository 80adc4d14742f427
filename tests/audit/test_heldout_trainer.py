"""Losses of NeMo-RL, from a checkout at KLAMP_CHECKOUTS/NeMo-RL: no other bench uses this trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit.bench import heldout_trainer as nemo
from tests.audit.bench.worlds import Score, make_world, run

FOLDER = Path(os.environ.get("KLAMP_CHECKOUTS", "")) / nemo.PROJECT


@pytest.fixture(scope="module")
def score() -> Iterator[Score]:
    if "KLAMP_CHECKOUTS" not in os.environ or not (FOLDER / "nemo_rl").is_dir():
        pytest.skip("NOT RUN: KLAMP_CHECKOUTS has no checkout of NeMo-RL")
    with nemo.imported(FOLDER) as (losses, advantages, helpers):
        cases = [*nemo.policy_losses(losses, advantages), *nemo.other_losses(losses)]
        cases += nemo.distillation(losses, helpers)
        yield run("NeMo-RL", cases, [make_world(11), make_world(12, shape=(8, 12), drift=0.5, lag=0)])


def test_no_sound_loss_is_accused(score: Score) -> None:
    assert score.counts["accused"] == 0, str(score)


def test_its_losses_are_named_right(score: Score) -> None:
    assert len(score.rows) == 70
    assert score.share() >= 0.8, str(score)  # 0.8 in the first run, with frozen thresholds
