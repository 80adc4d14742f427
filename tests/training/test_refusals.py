"""What a run on a service cannot do is refused by name, before any work."""

from __future__ import annotations

import pytest

from klamp.errors import ConfigError, UnknownNameError
from klamp.training.config import TrainConfig

REMOTE = {"backend": "tinker", "model": "some/model"}


def test_what_a_service_can_do_passes():
    kept = {"lora_r": 16, "ref_model": "tinker://run/sampler_weights/a", "num_iterations": 2, "kl_placement": "loss"}
    assert TrainConfig.from_flat(REMOTE | kept).run.backend == "tinker"


REFUSED = {
    "model": "builtin",
    "dtype": "bfloat16",
    "master_weights": "none",
    "lora_alpha": 16,
    "lora_target_modules": ("q_proj",),
    "gradient_checkpointing": True,
    "reference_device": "cpu",
    "reference_dtype": "bfloat16",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "kl_estimator": "exact",
    "exact_kl_completions": 2,
    "reference": "ema",
    "kl_early_stop": 0.1,
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_it_cannot_do_is_refused_by_name_and_fine_at_home(field):
    given = {field: REFUSED[field]}
    with pytest.raises(ConfigError, match="backend='tinker' cannot do this") as caught:
        TrainConfig.from_flat(REMOTE | given)
    assert f"got: {field}=" in str(caught.value)
    assert caught.value.why
    assert caught.value.fix
    TrainConfig.from_flat({"model": "some/model", "lora_r": 4} | given)


def test_a_checkpoint_of_this_machine_is_no_model_of_a_service(tmp_path):
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="backend='tinker' cannot do this(?s:.*)a checkpoint on this machine"):
        TrainConfig.from_flat(REMOTE | {"model": str(tmp_path)})


def test_backend_and_timeout_are_checked():
    with pytest.raises(UnknownNameError, match="unknown backend"):
        TrainConfig.from_flat({"backend": "tinkr"})
    with pytest.raises(ConfigError, match="service_timeout"):
        TrainConfig.from_flat({"service_timeout": 0.0})
