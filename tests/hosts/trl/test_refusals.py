"""Options of klamp and TRL that cannot work together: refused with the reason, before or after the trainer is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from tests.hosts.trl.hosts import arguments, klamp_trainer, model

from klamp.errors import ConfigError, UnknownNameError
from klamp.trl import GRPOConfig

LORA = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kl_early_stop": 0.1}, "optimizer step itself"),
        ({"reference": "remote", "reference_url": "http://localhost:1"}, "its own process"),
        ({"reference_device": "cpu"}, "device of the process"),
        ({"reference_share": 0.5}, "in one call"),
        ({"kl_normalizer": "token_mean", "loss_type": "grpo"}, "sequence_mean"),
        ({"kl_normalizer": "token_mean", "loss_type": "bnpo"}, "each micro-batch"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, "cancels beta"),
        ({"kl_placement": "advantage", "kl_estimator": "k1", "off_policy_mask_threshold": 0.1}, "sign of its"),
        ({"kl_placement": "advantage", "kl_estimator": "k1", "loss_type": "vespo"}, "sign of its"),
        ({"kl_placement": "advantage"}, "takes kl_estimator='k1' only"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        arguments(beta=0.1, **options)


def test_an_unknown_choice_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'reverse'"):
        arguments(beta=0.1, kl_gradient="revers")


def test_a_moving_reference_is_the_one_of_trl() -> None:
    ema = arguments(beta=0.1, reference="ema", reference_decay=0.75)
    assert (ema.sync_ref_model, ema.ref_model_mixup_alpha, ema.ref_model_sync_steps) == (True, 0.25, 1)
    periodic = arguments(beta=0.1, reference="periodic", reference_reset_steps=7)
    assert (periodic.sync_ref_model, periodic.ref_model_mixup_alpha, periodic.ref_model_sync_steps) == (True, 1.0, 7)


def test_a_loss_type_that_klamp_does_not_know_is_refused_by_name_where_the_kl_is_klamps() -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)unknown loss_type.*'dpao'.*did you mean 'dapo'") as caught:
        arguments(GRPOConfig, loss_type="dpao", beta=0.1, kl_estimator="k2")
    assert "luspo" in caught.value.why
    assert arguments(GRPOConfig, loss_type="dpao", beta=0.1).loss_type == "dpao", "TRL's own KL is TRL's business"


@pytest.mark.parametrize(
    ("options", "extra", "text"),
    [
        ({"reference": "adapter_off"}, {}, "needs a model with a PEFT adapter"),
        ({"reference": "adapter_off"}, {**LORA, "ref_model": "given"}, "cannot be combined with ref_model"),
        ({"reference_dtype": "bfloat16"}, LORA, "the policy itself with its adapter off"),
        ({"reference": "ema"}, {**LORA, "ref_model": "given"}, "an adapter is not among them"),
        ({"kl_estimator": "exact", "sync_ref_model": True}, {}, "the reference moves"),
        ({"kl_exclude_tokens": ["<nope>"]}, {}, "a token that the tokenizer does not have"),
    ],
)
def test_what_the_built_trainer_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any], text: str
) -> None:
    given = extra | ({"ref_model": model(seed=3)} if "ref_model" in extra else {})
    with pytest.raises(ConfigError, match=text):
        klamp_trainer(model(), tmp_path, beta=0.1, trainer=given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "scale_rewards": "none"},
        {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "scale_rewards": False},
        {"kl_placement": "advantage", "kl_estimator": "k1", "loss_type": "dapo"},
        {"kl_normalizer": "sequence_mean", "loss_type": "grpo"},
    ],
)
def test_their_neighbours_are_allowed(options: dict[str, Any]) -> None:
    assert arguments(beta=0.1, **options).kl_config() is not None


def test_a_kl_that_is_not_used_may_stand_anywhere() -> None:
    with pytest.warns(UserWarning, match="beta is 0"):
        args = arguments(beta=0.0, kl_placement="reward", kl_estimator="k1", kl_horizon="sequence")
    assert args.scale_rewards == "group"
