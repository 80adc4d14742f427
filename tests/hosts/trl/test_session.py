"""What klamp remembers between a trainer's calls: scorings while somebody listens, lengths, rewards."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.trl.hosts import klamp_trainer, model

from klamp.errors import KLWarning

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
    "proportional": {"kl_controller": "proportional", "kl_controller_horizon": 2},
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


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_what_a_resume_asks_for_counts(tmp_path: Path) -> None:
    """beta and the rate, from a run without a KL too; moments and step are the saved."""
    options: dict[str, Any] = {"kl_estimator": "k3", "save_strategy": "steps", "save_steps": 2}
    cosine: dict[str, Any] = {"lr_scheduler_type": "cosine", "max_steps": 4}
    base = model()
    klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.0, **options, **cosine).train()
    folder = str(tmp_path / "checkpoint-2")
    changed: dict[str, Any] = {"beta": 0.3, "learning_rate": 5e-3}
    for fields in ({}, {"kl_estimator": None}):
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path / "b", **options | cosine | changed | fields)
        trainer.train(resume_from_checkpoint=folder)
        rows = [row for row in trainer.state.log_history if "loss" in row][2:]
        assert [row["beta"] for row in rows] == [0.3, 0.3] and rows[0]["kl/k3"] > 0
        assert [row["learning_rate"] for row in rows] == pytest.approx([5e-3 * 0.5, 5e-3 * (1 - 2**-0.5) / 2])
        assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}
    stopped = klamp_trainer(copy.deepcopy(base), tmp_path / "c", **options | cosine | {"beta": 0.0})
    stopped.train(resume_from_checkpoint=folder)
    assert stopped.state.global_step == 4 and stopped.ref_model is None


def test_a_resume_without_klamps_fields_is_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "beta": 0.2}
    klamp_trainer(model(), tmp_path, kl_estimator="k3", **options).train()
    trainer = klamp_trainer(model(), tmp_path / "b", **options | {"max_steps": 2})
    with pytest.warns(KLWarning, match=r"written with klamp's KL, and no KL field is set now: beta=0.2"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
