"""A KL in verl's configuration: as a name and back, as overrides, and what is refused."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import KLConfig
from klamp.errors import ConfigError, KlampError, KLWarning, UnknownNameError
from klamp.hosts.verl.overrides import ACTOR, DRIVEN, IMPORTED, LOSS_FIELDS, is_ours, loss_kl, name_of
from klamp.verl import overrides

IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}
POSITIVE = st.floats(1e-6, 1e6)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "kl_estimator": st.sampled_from(["k1", "k2", "k3", "abs"]),
        "kl_gradient": st.sampled_from(["reverse", "forward", "own", "none"]),
        "kl_horizon": st.sampled_from(["token", "sequence"]),
        "kl_off_policy": st.sampled_from(["none", "token", "sequence"]),
        "kl_max_weight": st.none() | POSITIVE,
        "kl_max_log_ratio": st.none() | POSITIVE,
        "target_kl": st.none() | POSITIVE,
        "kl_controller": st.sampled_from(["hold", "step", "proportional"]),
        "kl_controller_factors": st.tuples(st.floats(1, 3), st.floats(0.1, 1), st.floats(1, 3), st.floats(0.1, 1)),
        "kl_controller_horizon": st.integers(1, 10_000),
        "beta_max": st.none() | st.floats(0.1, 1e3),
        "kl_exclude_tokens": st.lists(st.integers(0, 9) | st.sampled_from(["</s>", "a, (b", "it's"])).map(tuple),
    },
)


@given(FIELDS)
def test_a_kl_comes_back(fields: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        try:
            kl = KLConfig(beta=0.1, **fields)
        except KlampError:
            return
        assert loss_kl(name_of(kl, LOSS_FIELDS), 0.1) == kl


def test_a_name_says_what_differs_from_the_default() -> None:
    assert name_of(KLConfig(beta=0.7), LOSS_FIELDS) == "klamp"
    kl = KLConfig(kl_estimator="k1", kl_max_log_ratio=2.0)
    assert name_of(kl, LOSS_FIELDS) == "klamp:kl_estimator=k1,kl_max_log_ratio=2.0"
    assert loss_kl("klamp: kl_estimator = k1 , kl_max_log_ratio=2") == loss_kl(name_of(kl, LOSS_FIELDS))
    assert is_ours("klamp") and is_ours("klamp:kl_gradient=own")
    assert not any(map(is_ours, ("klamped", "low_var_kl", "k3+", "", None, 3)))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("klamp:kl_gradient", ConfigError, "FIELD=VALUE"),
        ("klamp:kl_gradient=own)(", ConfigError, "cannot be read"),
        ("klamp:kl_gradient=own,kl_gradient=forward", ConfigError, "each field once"),
        ("klamp:kl_gradint=own", UnknownNameError, "did you mean 'kl_gradient'"),
        ("klamp:beta=0.1", UnknownNameError, "unknown field"),
        ("klamp:kl_estimator=k9", ConfigError, "k9"),
    ],
)
def test_what_cannot_be_read(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        loss_kl(name)


def test_in_the_loss_and_on_the_page() -> None:
    assert overrides(KLConfig(beta=0.04, kl_gradient="forward", kl_max_log_ratio=5.0)) == [
        f"{ACTOR}.use_kl_loss=True",
        "algorithm.use_kl_in_reward=False",
        f"{ACTOR}.kl_loss_coef=0.04",
        f"{ACTOR}.kl_loss_type='klamp:kl_gradient=forward,kl_max_log_ratio=5.0'",
        IMPORTED,
    ]
    page = (Path(__file__).resolve().parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *overrides(KLConfig(beta=0.04)), "```"]) in page


def test_a_plain_kl_in_the_reward_is_verls_own_k1() -> None:
    assert overrides(KLConfig(beta=0.1, **IN_REWARD)) == [  # pyright: ignore[reportArgumentType]
        f"{ACTOR}.use_kl_loss=False",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=kl",
        "algorithm.kl_ctrl.type=fixed",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.norm_adv_by_std_in_grpo=False",
    ]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"target_kl": 0.05}, "klamp:target_kl=0.05"),
        ({"kl_exclude_tokens": ("</s>", 7)}, r"klamp:kl_exclude_tokens=(\'</s>\', 7)"),
        ({"kl_placement": "advantage", "kl_estimator": "k1"}, "klamp:kl_estimator=k1,kl_placement=advantage"),
        (
            {**IN_REWARD, "kl_max_log_ratio": 3.0},
            "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,kl_max_log_ratio=3.0",
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


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kl_estimator": "exact"}, "kl_estimator='exact'"),
        ({"kl_normalizer": "token_mean"}, "loss_agg_mode"),
        ({"reference": "ema"}, "reference='ema'"),
        ({"reference_dtype": "bfloat16"}, "reference_dtype"),
        ({"kl_early_stop": 0.1}, "kl_early_stop"),
    ],
)
def test_what_verl_has_no_place_for_is_refused_with_the_way_out(fields: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides(KLConfig(**fields))
    assert text in str(caught.value) and caught.value.why and caught.value.fix
