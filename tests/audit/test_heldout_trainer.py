"""Losses of NeMo-RL, from a checkout at KLAMP_CHECKOUTS/NeMo-RL: no other bench uses this trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.audit.bench import heldout_trainer as nemo
from tests.audit.bench.worlds import make_world, run


def test_its_losses_are_named_and_no_sound_one_is_accused() -> None:
    folder = Path(os.environ.get("KLAMP_CHECKOUTS", "none")) / nemo.PROJECT
    if not (folder / "nemo_rl").is_dir():
        pytest.skip("NOT RUN: KLAMP_CHECKOUTS has no checkout of NeMo-RL")
    with nemo.imported(folder) as (losses, advantages, helpers):
        cases = [*nemo.policy_losses(losses, advantages), *nemo.other_losses(losses, helpers)]
        score = run("NeMo-RL", cases, [make_world(11), make_world(12, shape=(8, 12), drift=0.5, lag=0)])
    assert len(score.rows) == 70
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= 0.8, str(score)  # of the first run, with frozen thresholds
