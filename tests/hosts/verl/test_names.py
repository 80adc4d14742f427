"""A KL as a name in verl's configuration, and back."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import KLConfig
from klamp.errors import ConfigError, KlampError, KLWarning, UnknownNameError
from klamp.hosts.verl.names import (
    CONTROLLER_FIELDS,
    TERM_FIELDS,
    controlled,
    is_ours,
    loss_kl,
    name_of,
    reward_kl,
)

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
        "kl_controller": st.sampled_from(["hold", "step", "proportional", "dual", "pid"]),
        "kl_controller_gain": st.floats(0.01, 0.9),
        "kl_controller_lead": st.floats(0, 100),
        "kl_controller_factors": st.tuples(st.floats(1, 3), st.floats(0.1, 1), st.floats(1, 3), st.floats(0.1, 1)),
        "kl_controller_clip": st.floats(0.01, 1),
        "kl_controller_horizon": st.integers(1, 10_000),
        "kl_controller_lr": POSITIVE,
        "kl_controller_gains": st.tuples(POSITIVE, POSITIVE, POSITIVE),
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
        ("klamp:kl_gradient=own,", ConfigError, "cannot be read"),
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
