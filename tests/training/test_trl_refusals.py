"""What TRL's loop cannot do is refused by name, before any work, and is fine in klamp's own."""

from __future__ import annotations

import pytest

from klamp.errors import ConfigError
from klamp.training.config import TrainConfig

CISPO = {"surrogate": "cispo"}

REFUSED = [
    ({"surrogate": "score_function"}, "no such loss"),
    (CISPO | {"loss_type": "dapo"}, "no lower bound"),
    (CISPO | {"epsilon": 1.0}, "mean over all tokens"),
    ({"kl_normalizer": "token_mean"}, "by the same"),
    ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, "over the whole group"),
    ({"reference": "ema", "lora_r": 2}, "an adapter is not among them"),
    ({"reference": "periodic", "resume": True, "output_dir": "somewhere"}, "do not hold a reference that moves"),
    ({"reference_dtype": "bfloat16", "lora_r": 2}, "the policy's data type"),
    ({"gradient_accumulation_steps": 3}, "parts of equal size"),
    ({"num_iterations": 2, "target_kl": 0.1}, "counts every update as a step"),
    ({"num_iterations": 2, "kl_schedule": "linear"}, "counts every update as a step"),
    ({"num_iterations": 2, "kl_warmup_steps": 2}, "counts every update as a step"),
    ({"num_iterations": 2, "kl_lr_guard": 0.1}, "counts every update as a step"),
    ({"num_iterations": 2, "reference": "ema"}, "counts every update as a step"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_trl_cannot_do_is_refused_with_the_way_out(given, why):
    with pytest.raises(ConfigError, match="backend='trl' cannot do this") as caught:
        TrainConfig.from_flat({"backend": "trl", **given})
    assert why in str(caught.value)
    assert caught.value.got
    assert caught.value.fix
    TrainConfig.from_flat(given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        CISPO | {"loss_type": "bnpo", "epsilon": 1.0},
        {"kl_normalizer": "fixed_length"},
        {"kl_normalizer": "token_mean", "loss_type": "dapo"},
        {"kl_normalizer": "token_mean", "beta": 0.0},
        {
            "kl_placement": "reward",
            "kl_estimator": "k1",
            "kl_horizon": "sequence",
            "advantage_baseline": "mean",
        },
        {"reference": "ema"},
        {"reference_dtype": "bfloat16", "lora_r": 2, "ref_model": "another"},
        {"gradient_accumulation_steps": 8, "num_iterations": 3},
        {"sampler": "vllm"},
    ],
)
def test_what_it_can_do_passes(given):
    assert TrainConfig.from_flat({"backend": "trl", **given}).run.backend == "trl"


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("local", {"sampler_url": "http://there:8000"}),
        ("local", {"sampler": "vllm"}),
        ("tinker", {"sampler_url": "http://there:8000"}),
        ("tinker", {"sampler": "vllm"}),
    ],
)
def test_vllm_writes_for_trl_alone(backend, given):
    with pytest.raises(ConfigError, match=f"backend='{backend}' cannot do this") as caught:
        TrainConfig.from_flat({"backend": backend, "model": "some/model", **given})
    assert "set backend to trl" in str(caught.value)
