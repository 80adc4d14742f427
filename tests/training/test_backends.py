"""What a backend cannot do is refused by name before any work, and is fine where it can be done; who trains with it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.conftest import IN_REWARD

from klamp.errors import ConfigError
from klamp.training.backends import OF_VERL, check_backend
from klamp.training.config import TrainConfig

MODEL = {"model": "some/model"}
NO_LOSS = ({"surrogate": "score_function"}, "no such loss")
CISPO = {"surrogate": "cispo"}
OFTEN = {"num_iterations": 2}
A_STEP = "counts every update as a step"

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "trl": [
        NO_LOSS,
        (CISPO | {"loss_type": "dapo"}, "no lower bound"),
        (CISPO | {"epsilon": 1.0}, "mean over all tokens"),
        ({"kl_normalizer": "token_mean"}, "by the same"),
        (IN_REWARD, "over the whole group"),
        ({"reference": "ema", "lora_r": 2}, "an adapter is not among them"),
        ({"reference": "periodic", "resume": True, "output_dir": "somewhere"}, "do not hold a reference that moves"),
        ({"reference_dtype": "bfloat16", "lora_r": 2}, "the policy's data type"),
        (OFTEN | {"target_kl": 0.1}, A_STEP),
        (OFTEN | {"kl_schedule": "linear"}, A_STEP),
        (OFTEN | {"kl_warmup_steps": 2}, A_STEP),
        (OFTEN | {"reference": "ema"}, A_STEP),
    ],
    "verl": [
        NO_LOSS,
        ({"loss_type": "grpo"}, "not where it is that of the others"),
        ({"ref_model": "another"}, "the model itself"),
        ({"dtype": "float16", "lora_r": 2}, "float16 was not tried"),
        ({"cpu": True}, "GPUs and NPUs"),
        ({"exact_kl_completions": 1}, "sampled tokens alone"),
        ({"mask_truncated_completions": True}, "every completion"),
        ({"max_steps": 0}, "no run without a step"),
        ({"lr_scheduler_type": "linear"}, "constant and cosine"),
        ({"gradient_accumulation_steps": 3}, "parts of the same size"),
    ],
}
CASES = [(backend, given, why) for backend, rows in REFUSED.items() for given, why in rows]

NOT_ALONE = [
    ("verl", {"sampler_url": "http://there:8000"}, "starts its own engines"),
    ("verl", {"gpus": 3}, "a multiple of 3"),
    ("verl", {"verl_args": ["trainer.save_freq"]}, "KEY=VALUE"),
    ("verl", {"kl_estimator": "exact"}, "no logits"),
    ("verl", {"teacher_url": "http://there:8000"}, "teacher_kind='remote' cannot be honoured by verl"),
    ("verl", {"teacher_model": "there", "temperature": 0.7}, "temperature=0.7 with a teacher"),
    ("verl", {"teacher_model": "there", "reward": "none"}, "leaves out its policy loss"),
    ("trl", {"kl_early_stop": 0.1, "num_iterations": 2}, "cannot be honoured by TRL"),
    ("trl", {"reference": "remote", "reference_url": "http://there:8000"}, "cannot be honoured by TRL"),
    ("trl", {"reference_device": "cpu"}, "cannot be honoured by TRL"),
    ("local", {"sampler": "vllm"}, "set backend to trl"),
    *((backend, {"sampler_url": "http://there:8000"}, "set backend to trl") for backend in ("local",)),
    *((backend, {"reference": "adapter_off"}, "needs an adapter") for backend in ("local", "trl")),
    ("local", {"reference": "ema", "ref_model": "another"}, "does not use ref_model"),
]
"""What klamp's own loop cannot do either, or another rule of it refuses."""

ALLOWED = [
    ("local", {"reference": "adapter_off", "lora_r": 2}),
    ("local", {"reference": "adapter_off", "beta": 0.0}),
    ("trl", CISPO | {"loss_type": "bnpo", "epsilon": 1.0}),
    ("trl", {"kl_normalizer": "fixed_length"}),
    ("trl", {"kl_normalizer": "token_mean", "loss_type": "dapo"}),
    ("trl", {"kl_normalizer": "token_mean", "beta": 0.0}),
    ("trl", IN_REWARD | {"advantage_baseline": "mean"}),
    ("trl", {"reference": "ema"}),
    ("trl", {"reference_dtype": "bfloat16", "lora_r": 2, "ref_model": "another"}),
    ("trl", {"gradient_accumulation_steps": 8, "num_iterations": 3}),
    ("trl", {"sampler": "vllm"}),
    ("verl", {"verl_args": ["~data.seed", "+new.key=1"], "sampler": "vllm", "exact_kl_completions": 0}),
]


def config_of(backend: str, given: dict[str, Any]) -> TrainConfig:
    return TrainConfig.from_flat({**MODEL, "backend": backend, **given})


@pytest.mark.parametrize(("backend", "given", "why"), [*CASES, *NOT_ALONE], ids=str)
def test_what_a_backend_cannot_do_is_refused_with_the_way_out(backend, given, why):
    config = config_of(backend, given)  # a record can be read
    with pytest.raises(ConfigError) as caught:
        check_backend(config)
    assert why in str(caught.value) and caught.value.why and caught.value.fix
    if (backend, given, why) in CASES:
        assert caught.value.what == f"backend='{backend}' cannot do this" and caught.value.got
        check_backend(config_of("local", given))


@pytest.mark.parametrize(("backend", "given"), ALLOWED, ids=str)
def test_what_it_can_do_passes(backend, given):
    check_backend(config_of(backend, given))


@pytest.mark.parametrize("backend", ["local", "trl"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_prompt_length", 10),
        ("machines", 2),
        ("ray_address", "auto"),
        ("stall_timeout", 10.0),
        ("verl_args", ["a=b"]),
    ],
)
def test_what_says_how_verl_is_started_means_nothing_elsewhere(field, value, backend):
    assert field in OF_VERL
    with pytest.raises(ConfigError, match=f"backend='{backend}' cannot do this") as caught:
        check_backend(config_of(backend, {field: value}))
    assert caught.value.got.startswith(f"{field}=")
    check_backend(config_of("verl", {field: value}))


@pytest.mark.parametrize("backend", ["local"])
@pytest.mark.parametrize("field", ["gpus", "gpu_memory"])
def test_gpus_are_divided_by_trl_and_verl_alone(field, backend):
    with pytest.raises(ConfigError, match=f"backend='{backend}' cannot do this"):
        check_backend(config_of(backend, {field: 2}))
    for other in ("trl", "verl"):
        check_backend(config_of(other, {field: 2}))
