"""One configuration: its other names, what it refuses, what it warns of, and what it builds."""

import dataclasses
import pickle
import warnings
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import ALIASES, KLConfig, KLWarning
from klamp.config.kl import ControllerName
from klamp.core import controllers
from klamp.core.clipping import ClipLevel
from klamp.core.term import OffPolicy, Placement
from klamp.core.types import ClipMethod, Gradient, Horizon, Value
from klamp.errors import ConfigError, UnknownNameError

COMBINATIONS = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.0, 0.1]),
        "kl_estimator": st.sampled_from(get_args(Value)),
        "kl_gradient": st.sampled_from(get_args(Gradient)),
        "kl_horizon": st.sampled_from(get_args(Horizon)),
        "kl_placement": st.sampled_from(get_args(Placement)),
        "kl_off_policy": st.sampled_from(get_args(OffPolicy)),
        "kl_clip_method": st.sampled_from(get_args(ClipMethod)),
        "kl_clip_level": st.sampled_from(get_args(ClipLevel)),
        "kl_controller": st.sampled_from([None, *get_args(ControllerName)]),
        "target_kl": st.sampled_from([None, 0.05]),
        "kl_exclude_tokens": st.sampled_from([(), ("special",)]),
    }
)


def quiet(**fields: Any) -> KLConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return KLConfig(**fields)


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_of_beta_is_beta_and_no_field_and_both_may_only_agree(name: str) -> None:
    assert KLConfig(**{name: 0.3}) == KLConfig(beta=0.3) == KLConfig(**{"beta": 0.3, name: 0.3})
    with pytest.raises(ConfigError, match="beta is given twice") as caught:
        KLConfig(**{"beta": 0.3, name: 0.2})
    assert all(alias in caught.value.why for alias in ALIASES)
    assert not hasattr(KLConfig(), name) and name not in {each.name for each in dataclasses.fields(KLConfig)}


MEANT = {"kl_estimater": "kl_estimator", "kl_coeff": "beta"}
MEANT |= {"kl": "k1", "mse": "k2", "full": "exact", "low_var_kl": "k3"}
"""A field's name with a mistake, or an estimator's name in another trainer -> klamp's name."""


@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_name_is_told_the_nearest_one_aliases_included(name: str) -> None:
    fields = {name: 1} if name.startswith("kl_") else {"kl_estimator": name}
    with pytest.raises(UnknownNameError) as caught:
        KLConfig(**fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.fix == f"did you mean {MEANT[name]!r}?"


def test_a_configuration_is_a_value() -> None:
    kl = KLConfig(beta=0.2, kl_estimator="k2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        kl.beta = 0.3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(kl) == hash(KLConfig(kl_estimator="k2", kl_coef=0.2))
    assert pickle.loads(pickle.dumps(kl)) == kl
    assert dataclasses.replace(kl, beta=0.4) == KLConfig(beta=0.4, kl_estimator="k2")
    with pytest.raises(TypeError):
        KLConfig(0.1)  # pyright: ignore[reportCallIssue]


def test_a_caution_is_said_once_where_the_configuration_is_made() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kl = KLConfig(kl_estimator="k1", kl_gradient="own")
    assert [str(each.message) for each in caught] == kl.cautions()
    assert all(each.category is KLWarning and each.filename == __file__ for each in caught)
    assert KLConfig().cautions() == []


def made_or_refused(fields: dict[str, Any]) -> KLConfig | ConfigError:
    """The configuration, or why there is none; any other error is one of klamp's."""
    try:
        return quiet(**fields)
    except ConfigError as error:
        return error


@given(COMBINATIONS)
def test_a_combination_either_builds_everything_or_is_refused_with_a_reason(fields: dict[str, Any]) -> None:
    kl = made_or_refused(fields)
    if isinstance(kl, ConfigError):
        assert kl.what and kl.why and kl.fix
        return
    term = kl.build_term()
    assert (term.value, term.gradient, term.horizon) == (kl.kl_estimator, kl.kl_gradient, kl.kl_horizon)
    assert (term.placement, term.off_policy) == (kl.kl_placement, kl.kl_off_policy)
    assert kl.build_controller().value == kl.beta
    assert all(isinstance(text, str) and text.endswith(".") for text in kl.cautions())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, controllers.FixedController(0.2)),
        ({"target_kl": 0.05}, controllers.HoldController(0.2, target=0.05, min_value=0.02)),
        (
            {"target_kl": 0.05, "kl_controller": "step", "kl_controller_factors": (2.0, 0.5, 1.2, 0.8)},
            controllers.StepController(0.2, target=0.05, up=2.0, down=0.5, high=1.2, low=0.8),
        ),
        (
            {"target_kl": 0.05, "kl_controller": "proportional", "kl_controller_horizon": 7},
            controllers.ProportionalController(0.2, target=0.05, horizon=7),
        ),
    ],
)
def test_the_named_controller_has_its_parameters(fields: dict[str, Any], expected: controllers.FixedController) -> None:
    found = quiet(beta=0.2, **fields).build_controller()
    assert type(found) is type(expected)
    for kl in (0.0, 0.02, 0.05, 0.3, 0.3, 0.01):
        assert found.update(kl) == expected.update(kl)


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [
        ({"target_kl": None}, (0.0, None)),
        ({}, (0.02, 3 / 0.05**0.5)),
        ({"beta": 5.0}, (0.5, 50.0)),
        ({"kl_controller": "step"}, (0.002, 3 / 0.05**0.5)),
        ({"kl_controller": "proportional"}, (0.002, 3 / 0.05**0.5)),
        ({"beta_min": 0.0, "beta_max": 1.0}, (0.0, 1.0)),
    ],
)
def test_beta_has_bounds_on_both_sides(fields: dict[str, Any], bounds: tuple[float, float | None]) -> None:
    kl = quiet(**{"beta": 0.2, "target_kl": 0.05, **fields})
    assert kl.beta_bounds == pytest.approx(bounds) if None not in bounds else kl.beta_bounds == bounds
