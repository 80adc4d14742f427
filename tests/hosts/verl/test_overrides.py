"""A KLConfig as overrides, what is refused, and what a configuration will do: all without verl."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from klamp.config import KLConfig, preset
from klamp.errors import ConfigError, UnsupportedVersion
from klamp.verl import effective, overrides, register

ACTOR = "actor_rollout_ref.actor"
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
    assert "\n".join([*str(effective(config())).splitlines()[1:], "```"]) in page, "but for the version installed"


def test_in_the_reward() -> None:
    kl = KLConfig(beta=0.1, kl_placement="reward", kl_estimator="k1", kl_horizon="sequence", target_kl=0.05)
    assert overrides(kl) == [
        f"{ACTOR}.use_kl_loss=False",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=klamp",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "algorithm.kl_ctrl.type=klamp",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.target_kl=0.05",
        IMPORTED,
    ]


def test_beta_0_is_no_kl_and_no_klamp() -> None:
    assert overrides(KLConfig(beta=0)) == [f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=False"]


REFUSED = [
    ({"kl_placement": "advantage", "kl_estimator": "k1"}, "kl_placement='advantage'"),
    ({"kl_estimator": "exact"}, "kl_estimator='exact'"),
    ({"kl_clip_method": "hard"}, "kl_clip_method='hard'"),
    ({"kl_exclude_prefix": 3}, "kl_exclude_"),
    ({"kl_normalizer": "token_mean"}, "loss_agg_mode"),
    ({"reference": "ema"}, "reference='ema'"),
    ({"reference_dtype": "bfloat16"}, "reference_dtype"),
    ({"reference_device": "cpu"}, "reference_device"),
    ({"reference_share": 0.5}, "reference_share"),
    ({"target_kl": 0.05}, "kl_placement='reward'"),
    ({"kl_schedule": "cosine"}, "kl_schedule"),
    ({"kl_warmup_steps": 5}, "kl_schedule"),
    ({"kl_lr_guard": 0.1}, "kl_lr_guard"),
    ({"kl_early_stop": 0.1}, "kl_early_stop"),
]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_what_verl_has_no_place_for_is_refused_with_the_way_out(fields: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides(KLConfig(**fields))
    assert text in str(caught.value) and caught.value.why and caught.value.fix


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


CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 128},
    "actor_rollout_ref": {
        "model": {"lora_rank": 0},
        "rollout": {"n": 8},
        "actor": {
            "use_kl_loss": True,
            "kl_loss_coef": 0.04,
            "kl_loss_type": "klamp",
            "loss_agg_mode": "token-mean",
            "policy_loss": {"loss_mode": "vanilla"},
        },
    },
    "algorithm": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False,
        "kl_penalty": "kl",
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1},
    },
}


def config(**changes: Any) -> dict[str, Any]:
    """The configuration above with some values changed, whichever section they are in."""
    made = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        for section in (made["actor_rollout_ref"]["actor"], made["actor_rollout_ref"]["model"], made["algorithm"]):
            if name in section:
                section[name] = value
    return made


def test_the_words_of_a_configuration() -> None:
    assert str(effective(config())).splitlines() == [
        "host       verl, not installed here",
        "term       klamp's",
        "beta       0.04",
        "controller fixed",
        "value      k3",
        "gradient   reverse per token: KL(policy||ref)",
        "placement  in the loss",
        "clip       none",
        "normalizer mean over the tokens of the mini-batch (loss_agg_mode=token-mean)",
        "reference  a frozen copy",
    ]
    assert effective(config(lora_rank=8)).reference == "the policy with its adapter off"
    without = effective(config(use_kl_loss=False))
    assert without.terms == () and "term       none" in str(without).splitlines()
    assert without.reference == "none: use_kl_loss and use_kl_in_reward are off"


def test_a_kl_in_both_places_is_two_terms_each_with_its_own_beta_and_controller() -> None:
    control = {"type": "klamp:kl_controller=dual", "kl_coef": 0.3, "horizon": 10000, "target_kl": 0.1}
    in_loss, in_reward = effective(config(use_kl_in_reward=True, kl_penalty="klamp", kl_ctrl=control)).terms
    assert (in_loss.placement, in_loss.beta, in_loss.controller) == ("in the loss", 0.04, "fixed")
    assert (in_reward.placement, in_reward.beta) == ("taken from the reward", 0.3)
    assert (in_reward.value, in_reward.gradient) == ("k1", "reverse over the sequence: KL(policy||ref)")
    assert in_reward.controller == "dual controller from 0.3, towards 0.1 nats per token"


@pytest.mark.parametrize(("kind", "text"), [("fixed", "fixed"), ("adaptive", "adaptive from 0.001, towards 0.1 nats")])
@pytest.mark.parametrize(("name", "value"), [("kl", "k1"), ("low_var_kl", "k3")])
def test_verls_own_in_the_reward(kind: str, text: str, name: str, value: str) -> None:
    control = {**CONFIG["algorithm"]["kl_ctrl"], "type": kind}
    (term,) = effective(config(use_kl_loss=False, use_kl_in_reward=True, kl_penalty=name, kl_ctrl=control)).terms
    assert (term.term, term.value, term.placement) == ("verl's own", value, "taken from the reward")
    assert term.controller.startswith(text)
    assert (term.gradient == "KL(policy||ref)") == (value == "k1")


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("kl", "k1", "zero in expectation: it holds nothing"),
        ("k1", "k1", "zero in expectation: it holds nothing"),
        ("mse", "k2", "KL(policy||ref)"),
        ("low_var_kl", "k3", "KL(ref||policy); its value stops at 10 nats"),
        ("k3+", "k3", "KL(policy||ref)"),
        ("full", "full", "unknown: verl raises NotImplementedError"),
    ],
)
def test_verls_own_names_in_words(name: str, value: str, gradient: str) -> None:
    (term,) = effective(config(kl_loss_type=name)).terms
    assert (term.term, term.value) == ("verl's own", value)
    assert term.gradient.startswith(gradient) and (term.gradient == gradient or name == "low_var_kl")


def test_what_may_surprise() -> None:
    def notes(**changes: Any) -> str:
        return " ".join(effective(config(**changes)).notes)

    assert notes() == ""
    assert "loss_mode must be klamp" in notes(kl_loss_type="klamp:kl_horizon=sequence")
    ready = config(kl_loss_type="klamp:kl_horizon=sequence", policy_loss={"loss_mode": "klamp:gspo"})
    assert effective(ready).notes == ()
    assert "counts twice" in notes(use_kl_in_reward=True)
    assert "beta cancels" in notes(use_kl_in_reward=True, use_kl_loss=False)
    assert "beta cancels" not in notes(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False)
    assert "biased" in notes(use_kl_in_reward=True, kl_penalty="low_var_kl")
    adaptive = {"type": "adaptive", "kl_coef": 0.1, "horizon": 100, "target_kl": 0.1}
    theirs = notes(use_kl_in_reward=True, kl_ctrl=adaptive)
    assert "turns beta negative: it multiplies by 1 - 0.2 * 1024 / 100" in theirs and "on resume" in theirs
    ours = notes(use_kl_in_reward=True, kl_ctrl=adaptive | {"type": "klamp:kl_controller=dual"})
    assert "negative" not in ours and "on resume" in ours
