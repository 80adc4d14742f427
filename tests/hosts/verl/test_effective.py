"""What a verl configuration's KL will do, in words: verl's own names, klamp's, and what may surprise; without verl."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.common.versions import host_version
from klamp.verl import effective

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
    made = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        for section in (made["actor_rollout_ref"]["actor"], made["actor_rollout_ref"]["model"], made["algorithm"]):
            if name in section:
                section[name] = value
    return made


@pytest.mark.parametrize("part", [{}, None, "config.yaml", CONFIG["actor_rollout_ref"], {"actor_rollout_ref": None}])
def test_a_part_of_a_configuration_is_refused_in_words(part: Any) -> None:
    with pytest.raises(ConfigError, match="no whole configuration of verl") as caught:
        effective(part)
    assert caught.value.got and caught.value.why and caught.value.fix


def test_a_missing_key_and_an_unknown_name_are_named() -> None:
    with pytest.raises(UnknownNameError, match="kl_gradint"):
        effective(config(kl_loss_type="klamp:kl_gradint=own"))
    without = config()
    del without["algorithm"]["kl_ctrl"]
    with pytest.raises(ConfigError, match="no whole configuration of verl: KeyError: 'kl_ctrl'"):
        effective(without)


def test_the_words_of_a_configuration() -> None:
    words = str(effective(config())).splitlines()
    page = (Path(__file__).resolve().parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(term .*?)```", page, re.S)
    assert [line for line in shown.splitlines() if line not in ("...", *words)] == []
    assert words[0] == f"host       {host_version('verl')}" and words[-1] == "reference  a frozen copy"
    assert effective(config(lora_rank=8)).reference == "the policy with its adapter off"
    without = effective(config(use_kl_loss=False))
    assert without.terms == () and "term       none" in str(without).splitlines()
    assert without.reference == "none: use_kl_loss and use_kl_in_reward are off"


def test_a_kl_in_both_places_is_two_terms_each_with_its_own_beta() -> None:
    control = {"type": "fixed", "kl_coef": 0.3, "horizon": 10000, "target_kl": 0.1}
    in_loss, in_reward = effective(config(use_kl_in_reward=True, kl_ctrl=control)).terms
    assert (in_loss.placement, in_loss.beta, in_loss.controller) == ("in the loss", 0.04, "fixed")
    assert (in_reward.placement, in_reward.beta) == ("taken from the reward", 0.3)
    target = "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,target_kl=0.1,kl_controller=step"
    driven = effective(config(kl_loss_type=target))
    assert driven.terms[0].controller == "step controller from 0.04, towards 0.1 nats per token"
    assert driven.terms[0].placement == "taken from the reward"
    assert driven.notes == ("this KL needs ++trainer.checkpoint_callback_class=klamp.verl.Driver",)
    callback = {"trainer": {"checkpoint_callback_class": "klamp.verl.Driver"}}
    assert effective(config(kl_loss_type=target) | callback).notes == ()


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


@pytest.mark.parametrize(
    ("changes", "price"),
    [
        ({"norm_adv_by_std_in_grpo": False}, "0.0457 reward per nat of a whole completion"),
        ({"adv_estimator": "rloo"}, "0.04 reward per nat of a whole completion"),
        ({"adv_estimator": "gae"}, "unknown: adv_estimator=gae"),
        ({"policy_loss": {"loss_mode": "gspo"}}, "unknown: loss_mode=gspo"),
        ({"kl_loss_type": "kl"}, "none: its gradient is that of no KL"),
        ({"use_kl_loss": False, "use_kl_in_reward": True}, "0.001 reward per nat of a whole completion"),
        ({"use_kl_loss": False, "use_kl_in_reward": True, "kl_penalty": "abs"}, "none: its gradient is that of no KL"),
    ],
)
def test_the_price_of_beta_or_why_it_is_unknown(changes: dict[str, Any], price: str) -> None:
    (term,) = effective(config(**changes)).terms
    assert term.price.startswith(price)
    alone = config()
    alone["actor_rollout_ref"]["rollout"]["n"] = 1
    assert effective(alone).terms[0].price == "unknown: rollout.n=1 leaves no group"


def test_what_may_surprise() -> None:
    def notes(**changes: Any) -> str:
        return " ".join(effective(config(**changes)).notes)

    assert notes() == ""
    assert "counts twice" in notes(use_kl_in_reward=True)
    assert "beta cancels" in notes(use_kl_in_reward=True, use_kl_loss=False)
    assert "beta cancels" not in notes(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False)
    assert "biased" in notes(use_kl_in_reward=True, kl_penalty="low_var_kl")
    adaptive = {"type": "adaptive", "kl_coef": 0.1, "horizon": 100, "target_kl": 0.1}
    theirs = notes(use_kl_in_reward=True, kl_ctrl=adaptive)
    assert "turns beta negative: it multiplies by 1 - 0.2 * 1024 / 100" in theirs and "on resume" in theirs
