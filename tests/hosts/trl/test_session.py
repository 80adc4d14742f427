"""What klamp remembers between a trainer's calls: scorings while somebody listens, lengths, rewards."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import klamp_trainer, model

from klamp.errors import KLWarning, UnsupportedVersion
from klamp.hosts.trl.session import Scoring, Session, only_scoring


def scoring(value: float) -> Scoring:
    return Scoring(torch.tensor([[value]]))


def test_calls_are_collected_by_the_innermost_listener_only() -> None:
    session = Session.of(None)
    assert session.seen is None, "nobody listens"
    with session.listening() as outer:
        assert session.seen is outer
        session.seen.append(scoring(1.0))
        with session.listening() as inner:
            session.seen.append(scoring(2.0))
        assert session.seen is outer
    assert session.seen is None
    assert [[float(each.logprobs) for each in found] for found in (outer, inner)] == [[1.0], [2.0]]


def test_a_loss_scores_the_policy_once() -> None:
    one = scoring(1.0)
    assert only_scoring([one]) is one
    for seen in ([], [one, one]):
        with pytest.raises(UnsupportedVersion, match=f"{len(seen)} calls of _get_per_token_logps_and_entropies"):
            only_scoring(seen)


OPTIONS: dict[str, Any] = {
    "beta": 0.4,
    "target_kl": 0.02,
    "kl_clip_method": "hard",
    "kl_clip_threshold": 0.005,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_completion_length": 20,
    "lr_scheduler_type": "constant",
}
CONTROLLERS: dict[str, dict[str, Any]] = {
    "hold": {"target_kl": 1e-4},
    "step": {"kl_controller": "step"},
    "pid": {"kl_controller": "pid", "kl_controller_gains": [1.0, 0.5, 0.5]},
}


def logged(trainer: Any) -> list[tuple[float, ...]]:
    names = ("loss", "beta", "kl/k3", "kl/reference_length", "kl/budget")
    return [tuple(row[name] for name in names) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_resumed_run_has_the_same_beta_and_losses(tmp_path: Path, name: str) -> None:
    options = OPTIONS | CONTROLLERS[name]
    base = model()
    whole = klamp_trainer(copy.deepcopy(base), tmp_path, **options)
    whole.train()
    saved = json.loads((tmp_path / "checkpoint-2" / "klamp_state.json").read_text())
    resumed = klamp_trainer(copy.deepcopy(base), tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == [pytest.approx(row) for row in logged(whole)]
    betas = [row[1] for row in logged(whole)]
    assert len(set(betas)) >= 3  # the controller moved
    assert saved["reference_length"] == logged(whole)[0][3]
    fresh = klamp_trainer(copy.deepcopy(base), tmp_path / "c", **options)
    assert fresh._klamp.control.beta(2, 4) != pytest.approx(betas[2])  # without the state it would be another


@pytest.mark.filterwarnings("ignore:kl_estimator:klamp.errors.KLWarning")
def test_a_checkpoint_without_the_state_says_so(tmp_path: Path) -> None:
    base = model()
    options = {**OPTIONS, "kl_reference_length": 5}
    klamp_trainer(copy.deepcopy(base), tmp_path, **(options | {"max_steps": 2})).train()
    (tmp_path / "checkpoint-2" / "klamp_state.json").unlink()
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path / "b", **options)
    with pytest.warns(KLWarning, match="holds no klamp_state.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(trainer)[2][1] == pytest.approx(0.4)  # the configured beta
