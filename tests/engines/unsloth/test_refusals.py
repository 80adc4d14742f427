"""What cannot be honoured on Unsloth is refused, with the reason and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.unsloth.hosts import attached

from klamp.config import KLConfig
from klamp.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kl_estimator": "exact"}, {}, "kl_estimator='exact' cannot be honoured by Unsloth"),
    ({"kl_normalizer": "sequence_sum"}, {}, "Unsloth normalises policy loss and KL together: sequence_mean"),
    ({"kl_normalizer": "sequence_mean"}, {"loss_type": "bnpo"}, "together: token_mean"),
    ({"reference": "ema"}, {}, "sync_ref_model=True"),
    ({"reference": "periodic"}, {}, "sync_ref_model=True"),
    ({"reference": "adapter_off"}, {}, "needs a model with a PEFT adapter"),
    ({"reference": "remote", "reference_url": "http://127.0.0.1:1"}, {}, "cannot be honoured by Unsloth"),
    ({"reference_device": "cpu"}, {}, "reference_device cannot be honoured by Unsloth"),
    ({"kl_early_stop": 0.1}, {}, "kl_early_stop cannot be honoured by Unsloth"),
    ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, {}, "scale_rewards='none'"),
    (
        {"kl_placement": "advantage", "kl_estimator": "k1"},
        {"off_policy_mask_threshold": 0.1},
        "cannot be combined with off_policy_mask_threshold",
    ),
    ({"kl_placement": "advantage", "kl_estimator": "k1"}, {"loss_type": "vespo"}, "another loss_type"),
    ({}, {"loss_type": "dpao"}, "did you mean 'dapo'?"),
]


@pytest.mark.parametrize(("kl", "args", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refused(kl: dict[str, Any], args: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        attached(tmp_path, KLConfig(beta=0.1, **kl), **args)
    assert text in str(raised.value) and "why:" in str(raised.value) and "fix:" in str(raised.value)


def test_left_out_tokens_under_weights_of_whole_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_GRPO_LOSS_AGGREGATION", "prompt")
    with pytest.raises(ConfigError, match="tokens cannot be left out of the KL"):
        attached(tmp_path, KLConfig(beta=0.1, kl_exclude_prefix=1)).train()


@pytest.mark.parametrize(
    ("loss_type", "normalizer"),
    [("grpo", "sequence_mean"), ("bnpo", "token_mean"), ("dr_grpo", "fixed_length"), ("luspo", "sequence_sum")],
)
def test_the_average_that_unsloth_has_is_taken(loss_type: str, normalizer: Any, tmp_path: Path) -> None:
    attached(tmp_path, KLConfig(beta=0.1, kl_normalizer=normalizer), loss_type=loss_type)
