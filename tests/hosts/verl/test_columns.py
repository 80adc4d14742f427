"""What a batch of verl is given for its loss; klamp in a stand-in of its trainer. The real ones: tests/engines/verl."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hosts.verl.test_overrides import IN_REWARD

from klamp.config import KLConfig
from klamp.config.loss import Price
from klamp.errors import ConfigError, KLWarning, NonFiniteError
from klamp.hosts.common.coefficient import KL_MASK
from klamp.hosts.common.control import KLControl
from klamp.hosts.verl import hooks
from klamp.hosts.verl.driver import BETA, TRAINER, Driver, StepSettings, by_prompt, columns
from klamp.hosts.verl.overrides import LOSS_FIELDS, name_of
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")

SETTINGS = StepSettings(loss_agg_mode="token-mean", group_size=2, beta=0.3, price=Price(beta=0.3), leave_one_out=False)
LENGTHS, PROMPTS = torch.tensor([3, 1, 2, 3]), ["b", "a", "b", "a"]


def sampled(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts with two completions each, next to each other in no order."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(3) < LENGTHS[:, None]
    old, ref = (torch.randn(4, 3, generator=generator, dtype=torch.float64) * mask for _ in range(2))
    return {
        "responses": torch.tensor([[1, 2, 3], [2, 0, 0], [1, 1, 0], [3, 2, 1]]),
        "response_mask": mask.long(),
        "old_log_probs": old,
        "ref_log_prob": ref,
        "advantages": torch.ones(4, 3, dtype=torch.float64) * mask,
        "rm_scores": torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
    }


def of(kl: KLConfig, settings: StepSettings = SETTINGS, tokenizer: Any = None) -> tuple[dict[str, torch.Tensor], Any]:
    return columns(sampled(), PROMPTS, KLControl(kl), tokenizer, settings)


def test_the_controller_takes_in_the_kl_of_the_step() -> None:
    kl = KLConfig(beta=0.3, target_kl=0.01)
    control, alone = KLControl(kl), KLControl(kl)
    x = sampled()
    for _ in range(3):
        beta = control.beta(0, 10)
        assert beta == alone.beta(0, 10)
        added, metrics = columns(x, PROMPTS, control, None, replace(SETTINGS, beta=beta, price=Price(beta=beta)))
        assert added[BETA].tolist() == [beta] * 4 and metrics["beta"] == metrics["beta/price"] == beta
        alone.update(metrics["kl/k3"], metrics, x["rm_scores"][[1, 3, 0, 2]].view(2, 2))
    assert control.controller.value != 0.3
    assert "beta/price" not in of(kl, replace(SETTINGS, price=None))[1], "none is known"
    with pytest.raises(NonFiniteError):
        columns(x | {"ref_log_prob": torch.full((4, 3), torch.nan)}, PROMPTS, control, None, SETTINGS)


class Data(dict[str, Any]):
    """As much of a batch of verl's as the loss looks at."""

    def select(self, *names: str, strict: bool) -> Data:
        return Data({name: self[name] for name in names if name in self})

    def to_padded_tensor(self) -> Data:
        return self

    def update(self, other: Any) -> Data:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().update(other)
        return self

    def copy(self) -> Data:
        return Data(self)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_the_advantages_of_each_update_hold_the_present_policys_kl(horizon: str, monkeypatch: Any) -> None:
    """The driver shifts by the old policy's KL; the loss adds what the updates since have changed."""
    kl = KLConfig(beta=0.3, kl_placement="advantage", kl_estimator="k1", kl_horizon=horizon)  # pyright: ignore[reportArgumentType]
    x, (added, _) = sampled(), of(kl)
    policy = x["old_log_probs"] - 0.7 * torch.rand(4, 3, dtype=torch.float64)
    monkeypatch.setitem(sys.modules, hooks.PADDING, SimpleNamespace(no_padding_2_padding=lambda values, data: values))
    options = {"use_kl_loss": True, "kl_loss_type": name_of(kl, LOSS_FIELDS), "kl_loss_coef": 9.0}
    loss = hooks._with_batch(lambda config, output, data, group: data["advantages"])
    shifted = loss(SimpleNamespace(**options), {"log_probs": policy}, Data(x | added))
    delta = (policy - x["ref_log_prob"]) * x["response_mask"]
    delta = delta if horizon == "token" else delta.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(shifted, (1 - 0.3 * delta) * x["response_mask"])


def test_incomplete_groups_are_refused() -> None:
    assert by_prompt(["b", "a", "b", "a"], 2).tolist() == [1, 3, 0, 2]
    for prompts in (["a", "a", "a", "b"], ["a", "b", "c", "d"], ["a"] * 4):
        with pytest.raises(ConfigError, match="not all in verl's batch") as caught:
            by_prompt(prompts, 2)
        assert caught.value.fix


def test_rows_that_fill_up_carry_no_kl_and_the_beta_of_the_others() -> None:
    kl = KLConfig(kl_exclude_tokens=(1,), kl_placement="advantage", kl_estimator="k1")
    order, prompts, tokenizer = [2, 0, 1, 2, 3], [None, *PROMPTS], arithmetic_tokenizer()
    whole = {name: x[order] for name, x in sampled().items()}
    filled, metrics = columns(whole, prompts, KLControl(kl), tokenizer, SETTINGS)
    alone, measured = of(kl, tokenizer=tokenizer)
    assert metrics == measured and filled.keys() == alone.keys()
    for name, column in filled.items():
        torch.testing.assert_close(column[1:], alone[name])
    assert filled[BETA].tolist() == [0.3] * 5 and not filled[KL_MASK][0].any()
    torch.testing.assert_close(filled["advantages"][0], whole["advantages"][0])


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
    monkeypatch.setitem(sys.modules, TRAINER, SimpleNamespace(PPOTrainer=fresh))
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
    for actor in ({"use_kl_loss": False}, {"kl_loss_type": "low_var_kl"}, {"kl_loss_type": "klamp"}):
        driver = Driver(config(tmp_path, actor=actor))
        assert driver.control is None and driver.extend(lambda: "the batch", None, None, {}) == "the batch"


def test_a_target_with_few_prompts_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(KLWarning, match="target_kl=0.05 may be missed with 4 prompts per step"):
        Driver(config(tmp_path) | {"data": {"train_batch_size": 4}})


def test_the_controller_goes_with_the_checkpoint(tmp_path: Path, trainer: type[Trainer]) -> None:
    driver, folder = Driver(config(tmp_path)), tmp_path / "global_step_1"
    assert driver.control is not None
    driver.control.update(0.5)
    trainer(driver, expected=folder / "klamp_state.json")._save_checkpoint()
    elsewhere = config(tmp_path / "other")
    elsewhere["trainer"] |= {"resume_mode": "resume_path", "resume_from_path": str(folder)}
    for again in (Driver(config(tmp_path)), Driver(elsewhere)):
        assert trainer(again)._load_checkpoint() == "loaded"
        assert again.control is not None and again.control.state_dict() == driver.control.state_dict()
        assert again.control.controller.value != 0.3


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
