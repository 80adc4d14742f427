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
    with pytest.warns(KLWarning, match=f"{name}=.* has no effect: it needs {next(iter(on))}="):
        KLConfig(**off)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        KLConfig(**{**off, **on})
        KLConfig()


def test_a_reference_url_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="(?s)'host:1' is no address.*fix: write http://"):
        KLConfig(reference="remote", reference_url="host:1")
