"""A KL in verl's configuration: as a name and back, as overrides, in the grammar of Hydra, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import KLConfig
from klamp.errors import ConfigError, KlampError, KLWarning, UnknownNameError
from klamp.hosts.verl.fields_in_verl import (
    CONTROLLER_FIELDS,
    IN_REWARD,
    TERM_FIELDS,
    controlled,
    is_ours,
    loss_kl,
    name_of,
    reward_kl,
)
from klamp.verl import overrides

POSITIVE = st.floats(1e-6, 1e6)
TERMS = st.fixed_dictionaries(
    {},
    optional={
        "kl_estimator": st.sampled_from(["k1", "k2", "k3", "abs"]),
        "kl_gradient": st.sampled_from(["reverse", "forward", "own", "none"]),
        "kl_horizon": st.sampled_from(["token", "sequence"]),
        "kl_off_policy": st.sampled_from(["none", "token", "sequence"]),
        "kl_max_weight": st.none() | POSITIVE,
        "kl_max_log_ratio": st.none() | POSITIVE,
    },
)
CONTROLS = st.fixed_dictionaries(
    {},
    optional={
        "kl_controller": st.sampled_from(["hold", "step", "proportional"]),
        "kl_controller_gain": st.floats(0.01, 0.9),
        "kl_controller_lead": st.floats(0, 100),
        "kl_controller_factors": st.tuples(st.floats(1, 3), st.floats(0.1, 1), st.floats(1, 3), st.floats(0.1, 1)),
        "kl_controller_clip": st.floats(0.01, 1),
        "kl_controller_horizon": st.integers(1, 10_000),
        "beta_min": st.none() | st.floats(0, 0.1),
        "beta_max": st.none() | st.floats(0.1, 1e3),
    },
)


def quiet(**fields: object) -> KLConfig | None:
    """The KL with these fields; None where klamp refuses them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        try:
            return KLConfig(**fields)
        except KlampError:
            return None


@given(TERMS)
def test_a_term_comes_back(fields: dict) -> None:
    kl = quiet(**fields)
    if kl is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KLWarning)
            assert loss_kl(name_of(kl, TERM_FIELDS)).build_term() == kl.build_term()


@given(CONTROLS)
def test_a_controller_comes_back(fields: dict) -> None:
    kl = quiet(beta=0.1, target_kl=0.05, **fields)
    if kl is not None:
        found = controlled(name_of(kl, CONTROLLER_FIELDS), beta=0.1, target_kl=0.05)
        assert type(found.build_controller()) is type(kl.build_controller())
        assert all(getattr(found, field) == getattr(kl, field) for field in CONTROLLER_FIELDS)


def test_a_name_says_what_differs_from_the_default() -> None:
    assert name_of(KLConfig(beta=0.7), TERM_FIELDS) == "klamp"
    kl = KLConfig(kl_estimator="k1", kl_max_log_ratio=2.0)
    assert name_of(kl, TERM_FIELDS) == "klamp:kl_estimator=k1,kl_max_log_ratio=2.0"
    assert loss_kl("klamp: kl_estimator = k1 , kl_max_log_ratio=2") == loss_kl(name_of(kl, TERM_FIELDS))


def test_which_names_are_klamps() -> None:
    assert is_ours("klamp") and is_ours("klamp:kl_gradient=own")
    assert not any(map(is_ours, ("klamped", "low_var_kl", "k3+", "", None, 3)))


def test_in_the_reward_it_is_k1_over_the_completion() -> None:
    kl = reward_kl("klamp")
    assert (kl.kl_placement, kl.kl_estimator, kl.kl_horizon) == ("reward", "k1", "sequence")
    with pytest.raises(ConfigError, match="takes kl_estimator='k1' only"):
        reward_kl("klamp:kl_estimator=k3")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("klamp:kl_gradient", ConfigError, "FIELD=VALUE"),
        ("klamp:kl_gradient=own)(", ConfigError, "cannot be read"),
        ("klamp:kl_gradient=own,kl_gradient=forward", ConfigError, "each field once"),
        ("klamp:kl_gradint=own", UnknownNameError, "did you mean 'kl_gradient'"),
        ("klamp:beta=0.1", UnknownNameError, "unknown field"),
        ("klamp:kl_estimator=k9", ConfigError, "k9"),
        ("klamp:kl_max_log_ratio=-1", ConfigError, "kl_max_log_ratio"),
    ],
)
def test_what_cannot_be_read(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        loss_kl(name)


ACTOR = "actor_rollout_ref.actor"
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"


def test_in_the_loss() -> None:
    assert overrides(KLConfig(beta=0.04, kl_gradient="forward", kl_max_log_ratio=5.0)) == [
        f"{ACTOR}.use_kl_loss=True",
        "algorithm.use_kl_in_reward=False",
        f"{ACTOR}.kl_loss_coef=0.04",
        f"{ACTOR}.kl_loss_type='klamp:kl_gradient=forward,kl_max_log_ratio=5.0'",
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
    ],
)
def test_what_needs_the_whole_batch_goes_through_the_driver(fields: dict, name: str) -> None:
    found = overrides(KLConfig(beta=0.1, **fields))
    assert f"{ACTOR}.kl_loss_type='{name}'" in found and f"{ACTOR}.kl_loss_coef=0.1" in found
    assert f"{ACTOR}.use_kl_loss=True" in found and "algorithm.use_kl_in_reward=False" in found and DRIVEN in found
    assert ("algorithm.norm_adv_by_std_in_grpo=False" in found) == (fields.get("kl_placement") == "reward")


def test_beta_0_is_no_kl_and_no_klamp() -> None:
    assert overrides(KLConfig(beta=0)) == [f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=False"]


REFUSED = [
    ({"kl_estimator": "exact"}, "kl_estimator='exact'"),
    ({"kl_normalizer": "token_mean"}, "loss_agg_mode"),
    ({"reference": "ema"}, "reference='ema'"),
    ({"reference_dtype": "bfloat16"}, "reference_dtype"),
    ({"kl_early_stop": 0.1}, "kl_early_stop"),
]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_what_verl_has_no_place_for_is_refused_with_the_way_out(fields: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides(KLConfig(**fields))
    assert text in str(caught.value) and caught.value.why and caught.value.fix
