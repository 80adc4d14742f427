"""Settings that another setting switches off are said, each with what it needs; settings that work are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from klamp.config import KLConfig, KLWarning
from klamp.errors import ConfigError


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"kl_clip_threshold": 0.1}, {"kl_clip_method": "hard"}),
        ({"kl_clip_level": "group"}, {"kl_clip_method": "hard"}),
        ({"kl_clip_temperature": 0.01}, {"kl_clip_method": "soft"}),
        ({"kl_clip_temperature": 0.01, "kl_clip_method": "hard"}, {"kl_clip_method": "soft"}),
        ({"use_per_token_kl_threshold": False}, {"kl_clip_method": "hard"}),
        ({"kl_reference_length": 50}, {"kl_clip_method": "hard"}),
        ({"kl_max_log_ratio": 3.0, "kl_estimator": "exact"}, {"kl_estimator": "k3"}),
        ({"kl_off_policy": "token", "kl_estimator": "exact"}, {"kl_off_policy": "sequence"}),
        (
            {"kl_normalizer": "token_mean", "kl_placement": "advantage", "kl_estimator": "k1"},
            {"kl_placement": "loss"},
        ),
        ({"kl_controller_horizon": 9, "target_kl": 0.05}, {"kl_controller": "proportional"}),
        ({"kl_controller_lr": 0.1, "target_kl": 0.05}, {"kl_controller": "dual"}),
        ({"kl_controller_gains": (1.0, 0.0, 0.0), "target_kl": 0.05}, {"kl_controller": "pid"}),
        ({"reference_device": "cpu", "reference": "adapter_off"}, {"reference": "frozen"}),
        ({"reference_dtype": "bfloat16", "reference": "adapter_off"}, {"reference": "ema"}),
        ({"kl_max_weight": 2.0}, {"kl_off_policy": "token"}),
        ({"kl_schedule_end": 0.5}, {"kl_schedule": "linear"}),
        ({"target_kl": 0.05, "kl_controller": "fixed"}, {"kl_controller": "step"}),
        ({"reference_decay": 0.9}, {"reference": "ema"}),
        ({"reference_reset_steps": 5}, {"reference": "periodic"}),
        ({"reference_url": "http://host:1"}, {"reference": "remote"}),
    ],
)
def test_a_setting_without_effect_is_warned_of(off: dict[str, Any], on: dict[str, Any]) -> None:
    name = next(iter(off))
    with pytest.warns(KLWarning, match=f"{name}=.* has no effect: it needs .*{next(iter(on))}="):
        KLConfig(**off)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        KLConfig(**{**off, **on})
        KLConfig()


@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_a_target_that_beta_0_never_holds_is_warned_of(beta: float) -> None:
    """At beta 0 there is no controller but those that start from nothing: the target would be dropped silently."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KLWarning)
        kl = KLConfig(beta=beta, target_kl=0.05)
        KLConfig(beta=beta, target_kl=0.05, kl_controller="dual")
    assert kl.controller_name == ("fixed" if beta == 0 else "step")
    texts = [str(each.message) for each in caught]
    assert len(texts) == (beta == 0), texts
    assert all("target_kl=0.05 has no effect: it needs a beta above 0" in text for text in texts)


@pytest.mark.parametrize("bound", [{"beta_min": 0.001}, {"beta_max": 1.0}])
def test_a_bound_of_a_beta_that_does_not_move_is_warned_of(bound: dict[str, Any]) -> None:
    with pytest.warns(KLWarning, match=f"{next(iter(bound))}=.* has no effect: it needs a controller"):
        KLConfig(**bound)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        KLConfig(target_kl=0.05, **bound)


def test_a_kl_without_a_gradient_is_warned_of() -> None:
    with pytest.warns(KLWarning, match="kl_gradient='none' with a beta above 0(?s:.*)kl_monitor=True"):
        KLConfig(kl_gradient="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        KLConfig(kl_gradient="none", beta=0.0, kl_monitor=True)


def test_a_reference_url_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="(?s)'host:1' is no address.*fix: write http://"):
        KLConfig(reference="remote", reference_url="host:1")
