"""The methods of a run: what changes the mathematics changes the words, and what is not used is not there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from klamp.config import PRESETS, KLConfig, LossConfig
from klamp.config.describe import describe_both_prices
from klamp.config.price import configured_price
from klamp.report.methods import Setting, methods

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SETTING = Setting(model="m", steps=10, max_length=1000, versions={"klamp": "0.1.0", "trl": "not installed"})


def written(setting: Setting = SETTING, loss: LossConfig | None = None, **choices: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kl = KLConfig(**choices)
    return " ".join(methods(kl, loss or LossConfig(), setting).split())


@pytest.fixture(scope="module")
def default() -> str:
    return written()


def test_it_is_one_paragraph_with_one_equation(default: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = methods(KLConfig(), LossConfig(), SETTING)
    assert "\n\n" not in text and max(map(len, text.splitlines())) <= 140
    assert text.count(r"\begin{equation}") == text.count(r"\end{equation}") == 1
    assert "pulls the policy along the gradient of $\\mathrm{KL}(\\pi" in default, "as `klamp explain` says"
    assert "klamp 0.1.0" in default and "trl" not in default


READ: dict[str, str] = {}
"""What was written -> the choice that it stands for."""
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "estimator": ({"kl_estimator": "k1"}, "estimated by k1"),
    "gradient": ({"kl_gradient": "forward"}, "its gradient is forward"),
    "horizon": ({"kl_horizon": "sequence"}, "reverse over the sequence"),
    "off-policy": ({"kl_off_policy": "token"}, "off-policy weight per token"),
    "weight": ({"kl_off_policy": "token", "kl_max_weight": 2.0}, "per token up to 2"),
    "bound": ({"kl_max_log_ratio": 10.0}, "log-ratio bounded at 10"),
    "normalizer": ({"kl_normalizer": "sequence_sum"}, "otherwise, as the mean over completions of the sum over tokens"),
    "beta": ({"beta": 0.04}, "fixed at 0.04"),
    "schedule": ({"kl_schedule": "linear", "kl_schedule_end": 0.2}, "schedule linear"),
    "warm-up": ({"kl_warmup_steps": 7}, "7 steps of warm-up"),
    "controller": ({"target_kl": 0.05}, "hold controller from 0.01, towards 0.05 nats per token"),
    "dual": ({"target_kl": 0.05, "kl_controller": "dual"}, "dual ascent, step 0.01"),
    "clip": ({"kl_clip_method": "hard", "kl_clip_threshold": 0.1}, "hard clip at 0.1 nats per token"),
    "soft clip": ({"kl_clip_method": "soft", "kl_clip_temperature": 0.25}, "width 0.25 nats"),
    "clip level": (
        {"kl_clip_method": "hard", "kl_clip_level": "batch"},
        "the mean KL of the other completions of the batch",
    ),
    "exact clip": ({"kl_clip_method": "hard", "kl_estimator": "exact"}, "its own KL, exact at the sampled prefixes"),
    "exact group": (
        {"kl_clip_method": "hard", "kl_estimator": "exact", "kl_clip_level": "group"},
        "the mean exact KL of all completions of its prompt, its own included",
    ),
    "tokens": ({"kl_exclude_tokens": ("special",)}, "the tokens special"),
    "prefix": ({"kl_exclude_prefix": 3}, "the first 3 tokens of each completion"),
    "between": ({"kl_exclude_between": ("<t>", "</t>")}, r"\textless{}t\textgreater{} and \textless{}/t\textgreater{}"),
    "share": ({"reference_share": 0.25}, r"scores 25\% of the sequences"),
    "early stop": ({"kl_early_stop": 0.1}, "exceeds 0.1 nats per token"),
    "guard": ({"kl_lr_guard": 0.2}, "multiplied by 0.2 / KL"),
    "reward": ({"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}, "taken from the reward"),
    "clipped reward": (
        {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence", "kl_clip_method": "hard"},
        "(unclipped, with all tokens in it)",
    ),
    "advantage": ({"kl_estimator": "k1", "kl_placement": "advantage"}, "k1 of the token, is taken from the advantage"),
    "to go": (
        {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
        "of the token and all later ones",
    ),
    "bounded advantage": (
        {"kl_estimator": "k1", "kl_placement": "advantage", "kl_max_log_ratio": 5.0},
        r"bounded at $\pm$5 nats",
    ),
    "moving": ({"reference": "ema"}, "does not bound the distance from the start"),
    "none": ({"beta": 0.0}, "no KL term: $\\beta$ is 0, and no reference was loaded"),
    "monitored": ({"beta": 0.0, "kl_monitor": True}, "was only logged"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_choice_that_changes_the_mathematics_changes_the_words(name: str, default: str) -> None:
    choices, said = CHANGES[name]
    text = written(**choices)
    assert said in text
    assert said not in default
    assert READ.setdefault(text, name) == name, "two choices that read alike"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"loss_type": "grpo"}, "mean over completions of the mean over tokens"),
        ({"loss_type": "dapo"}, "mean over the tokens of the optimizer step"),
        ({"scale_rewards": "std"}, "divided by the standard deviation s of the rewards"),
        ({"advantage_baseline": "mean"}, "its own included (j runs over all G)"),
        ({"surrogate": "cispo"}, "the loss of CISPO"),
        ({"surrogate": "score_function"}, "the score function (REINFORCE)"),
        ({"epsilon": 0.1}, "0.9, 1.1"),
        ({"epsilon_high": 0.28}, "0.8, 1.28"),
    ],
)
def test_the_loss_changes_the_words(choices: dict[str, Any], said: str, default: str) -> None:
    assert said in written(loss=LossConfig(**choices)) and said not in default


def test_the_price_in_both_units_at_the_length_of_the_run() -> None:
    recorded = Setting(model="m", steps=10, max_length=1000, mean_length=250.0, last_beta=0.02)
    assert "0.02 reward per nat of a whole completion; of the mean per token, at 250 tokens: 5 per nat" in written(
        recorded
    )
    assert "at 1000 tokens: 10 per nat (the longest, since no mean is recorded)" in written()
    price = configured_price(KLConfig(), LossConfig(scale_rewards="std"), group_size=8, mean_length=9, max_length=9)
    assert describe_both_prices(price, group_size=8, length=9).endswith("0.09 x that standard deviation per nat")


def test_a_beta_that_moved_is_said() -> None:
    moved = Setting(model="m", steps=10, last_beta=0.63)
    assert "At the end of the run it was 0.63." in written(moved, target_kl=0.05)
    assert "At the end of the run" not in written(Setting(model="m", steps=10, last_beta=0.01))


def test_the_setting_is_said() -> None:
    text = written(
        Setting(model="a LoRA adapter of rank 8 on m", steps=7, updates=3, trainer="TRL", prompts=5, group_size=4,
                sampling="temperature 0.7, top-p 0.9", reference="the policy with its adapter off")
    )  # fmt: skip
    for said in ("rank 8", "7 steps", "3 updates", "in TRL", "5 prompts", "G = 4", "top-p 0.9", "adapter off"):
        assert said in text
    assert "The versions are not recorded." in text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preset = PRESETS[name]
        text = methods(preset.kl, preset.loss, SETTING)
    assert text.count("$") % 2 == 0 and "None" not in text and "  " not in text.replace("\n", " ")
