"""What verl has no place for: refused wherever a KL is handed to it, each with the reason and the way out."""

from __future__ import annotations

import pytest

from klamp.config import KLConfig
from klamp.errors import ConfigError
from klamp.hosts.verl.refusals import check
from klamp.verl import overrides

REFUSED = [
    ({"kl_estimator": "exact"}, "kl_estimator='exact'"),
    ({"kl_normalizer": "token_mean"}, "loss_agg_mode"),
    ({"reference": "ema"}, "reference='ema'"),
    ({"reference_dtype": "bfloat16"}, "reference_dtype"),
    ({"reference_device": "cpu"}, "reference_device"),
    ({"reference_share": 0.5}, "reference_share"),
    ({"kl_early_stop": 0.1}, "kl_early_stop"),
]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_what_verl_has_no_place_for_is_refused_with_the_way_out(fields: dict, text: str) -> None:
    for hand_over in (check, overrides):
        with pytest.raises(ConfigError) as caught:
            hand_over(KLConfig(**fields))
        assert text in str(caught.value) and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kl_horizon": "sequence", "kl_off_policy": "sequence", "kl_max_weight": 2.0},
        {"kl_max_log_ratio": 5.0, "kl_gradient": "forward"},
        {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "target_kl": 0.05},
        {"beta": 0.0},
        {"kl_placement": "advantage", "kl_estimator": "k1", "kl_clip_method": "hard"},
        {"kl_exclude_prefix": 3, "target_kl": 0.05, "kl_lr_guard": 0.1},
        {"kl_schedule": "cosine", "kl_warmup_steps": 5},
    ],
)
def test_what_verl_can_carry_is_not_refused(fields: dict) -> None:
    check(KLConfig(**fields))
