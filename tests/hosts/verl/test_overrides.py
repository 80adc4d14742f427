"""A KLConfig as overrides of verl's configuration, without verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.config import KLConfig, preset
from klamp.errors import UnsupportedVersion
from klamp.hosts.verl.names import IN_REWARD
from klamp.verl import overrides, register

ACTOR = "actor_rollout_ref.actor"
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"


def test_in_the_loss() -> None:
    assert overrides(KLConfig(beta=0.04, kl_gradient="forward", kl_max_log_ratio=5.0)) == [
        f"{ACTOR}.use_kl_loss=True",
        "algorithm.use_kl_in_reward=False",
        f"{ACTOR}.kl_loss_coef=0.04",
        f"{ACTOR}.kl_loss_type='klamp:kl_gradient=forward,kl_max_log_ratio=5.0'",
        f"{ACTOR}.policy_loss.loss_mode=klamp",
        IMPORTED,
    ]


def test_the_page_shows_them() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *overrides(KLConfig(beta=0.04)), "```"]) in page


def test_in_the_reward() -> None:
    kl = KLConfig(beta=0.1, kl_placement="reward", kl_estimator="k1", kl_horizon="sequence")
    assert overrides(kl) == [
        f"{ACTOR}.use_kl_loss=False",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=klamp",
        "algorithm.kl_ctrl.type=fixed",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.norm_adv_by_std_in_grpo=False",
        IMPORTED,
    ]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"target_kl": 0.05}, "klamp:target_kl=0.05"),
        ({"kl_exclude_tokens": ("</s>", 7)}, r"klamp:kl_exclude_tokens=(\'</s>\', 7)"),
        ({"kl_placement": "advantage", "kl_estimator": "k1"}, "klamp:kl_estimator=k1,kl_placement=advantage"),
        (
            {**IN_REWARD, "target_kl": 0.05},
            "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,target_kl=0.05",
        ),
        (
            {**IN_REWARD, "kl_exclude_prefix": 2},
            "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,kl_exclude_prefix=2",
        ),
    ],
)
def test_what_needs_the_whole_batch_goes_through_the_driver(fields: dict, name: str) -> None:
    found = overrides(KLConfig(beta=0.1, **fields))
    assert f"{ACTOR}.kl_loss_type='{name}'" in found and f"{ACTOR}.kl_loss_coef=0.1" in found
    assert f"{ACTOR}.use_kl_loss=True" in found and "algorithm.use_kl_in_reward=False" in found and DRIVEN in found
    assert ("algorithm.norm_adv_by_std_in_grpo=False" in found) == (fields.get("kl_placement") == "reward")


def test_beta_0_is_no_kl_and_no_klamp() -> None:
    assert overrides(KLConfig(beta=0)) == [f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=False"]


def test_a_preset_goes_too() -> None:
    assert any("kl_loss_type" in text for text in overrides(preset("grpo")))


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_without_verl_register_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (None, "0.7.1", "0.10.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, v=installed: _version(v))
        with pytest.raises(UnsupportedVersion, match="klamp.verl needs verl"):
            register()


def _version(installed: str | None) -> str:
    from importlib.metadata import PackageNotFoundError

    if installed is None:
        raise PackageNotFoundError("verl")
    return installed
