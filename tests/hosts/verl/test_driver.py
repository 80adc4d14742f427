"""klamp's part in verl's trainer, with a stand-in for the trainer; the real one is in `tests/engines/verl`."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.hosts.verl.test_overrides import IN_REWARD

from klamp.config import KLConfig
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.verl.driver import TRAINER, Driver
from klamp.hosts.verl.overrides import LOSS_FIELDS, name_of

pytestmark = pytest.mark.filterwarnings("ignore:kl_controller:klamp.errors.KLWarning")
HELD = KLConfig(beta=0.3, target_kl=0.05, kl_controller="proportional")


class Trainer:
    """As much of verl's trainer as the driver looks at."""

    def __init__(self, driver: Driver, *, step: int = 1, **more: Any) -> None:
        self.checkpoint_callback, self.global_steps = driver, step
        vars(self).update(more)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _save_checkpoint(self) -> None:
        assert not hasattr(self, "expected") or self.expected.is_file(), "saved before verl calls it complete"

    def _load_checkpoint(self) -> str:
        return "loaded"


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[Trainer]:
    """A trainer class that nothing has hooked yet, where verl has its own."""
    fresh = type("PPOTrainer", (Trainer,), {name: vars(Trainer)[name] for name in vars(Trainer) if name[1:2] != "_"})
    module: Any = ModuleType(TRAINER)
    module.PPOTrainer = fresh
    monkeypatch.setitem(sys.modules, TRAINER, module)
    return fresh


def config(folder: Path, kl: KLConfig = HELD, **changes: Any) -> dict[str, Any]:
    name = name_of(kl, LOSS_FIELDS)
    actor = {"use_kl_loss": True, "kl_loss_type": name, "kl_loss_coef": kl.beta, "loss_agg_mode": "token-mean"}
    return {
        "actor_rollout_ref": {"actor": {**actor, **changes.pop("actor", {})}, "rollout": {"n": 2}},
        "algorithm": {"adv_estimator": "rloo", **changes},
        "data": {"train_batch_size": 8},
        "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
    }


def test_it_drives_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    assert Driver(config(tmp_path)).control is not None
    for actor in ({"use_kl_loss": False}, {"kl_loss_type": "low_var_kl"}, {"kl_loss_type": "klamp"}):
        driver = Driver(config(tmp_path, actor=actor))
        assert driver.control is None and driver.extend(lambda: "the batch", None, None, {}) == "the batch"


def test_a_target_with_few_prompts_is_warned_of(tmp_path: Path) -> None:
    few = config(tmp_path) | {"data": {"train_batch_size": 4}}
    with pytest.warns(KLWarning, match="target_kl=0.05 may be missed with 4 prompts per step"):
        Driver(few)


def test_the_controller_goes_with_the_checkpoint(tmp_path: Path, trainer: type[Trainer]) -> None:
    driver = Driver(config(tmp_path))
    assert driver.control is not None
    driver.control.update(0.5)
    trainer(driver, expected=tmp_path / "global_step_1" / "klamp_state.json")._save_checkpoint()
    again = Driver(config(tmp_path))
    assert trainer(again)._load_checkpoint() == "loaded"
    assert again.control is not None and again.control.state_dict() == driver.control.state_dict()
    assert again.control.controller.value != 0.3
    elsewhere = config(tmp_path / "other")
    elsewhere["trainer"] |= {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_1")}
    moved = Driver(elsewhere)
    trainer(moved)._load_checkpoint()
    assert moved.control is not None and moved.control.state_dict() == driver.control.state_dict()


def test_a_checkpoint_of_another_kind_is_told(tmp_path: Path, trainer: type[Trainer]) -> None:
    trainer(Driver(config(tmp_path)))._save_checkpoint()
    with pytest.warns(KLWarning, match="is missing"):
        trainer(Driver(config(tmp_path)), step=2)._load_checkpoint()
    other = Driver(config(tmp_path, replace(HELD, beta=0.4, kl_controller="proportional")))
    trainer(other)._load_checkpoint()
    assert other.control is not None and other.control.controller.value == 0.4, "another controller begins anew"
    trainer(Driver(config(tmp_path)), step=0)._load_checkpoint()  # from the start: nothing to read


def test_verls_class_is_hooked_once(tmp_path: Path, trainer: type[Trainer]) -> None:
    Driver(config(tmp_path))
    hooked = trainer._compute_advantage
    Driver(config(tmp_path))
    assert trainer._compute_advantage is hooked
    other = SimpleNamespace(checkpoint_callback=object(), global_steps=1)
    assert trainer._compute_advantage(other, "the batch", metrics={}) == "the batch", "of another callback"  # pyright: ignore[reportArgumentType]


def test_a_kl_in_the_reward_needs_advantages_it_can_be_put_into(tmp_path: Path) -> None:
    kl = KLConfig(beta=0.3, kl_max_log_ratio=2.0, **IN_REWARD)  # pyright: ignore[reportArgumentType]
    assert Driver(config(tmp_path, kl)).control is not None
    Driver(config(tmp_path, kl, adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    for algorithm in ({"adv_estimator": "grpo"}, {"adv_estimator": "gae"}):
        with pytest.raises(ConfigError, match="adv_estimator=rloo"):
            Driver(config(tmp_path, kl, **algorithm))
