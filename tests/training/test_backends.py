"""What a backend cannot do is refused by name before any work, and is fine where it can be done; who trains with it."""

from typing import Any

import pytest
from tests.training.conftest import IN_REWARD

from klamp.errors import ConfigError
from klamp.lab.backends import ONLY, check_backend
from klamp.lab.config import TrainConfig

MODEL = {"model": "some/model"}
NO_LOSS = ({"surrogate": "score_function"}, "no such loss")
CISPO = {"surrogate": "cispo"}
OFTEN = {"num_iterations": 2}
A_STEP = "counts every update as a step"
MOVES = "do not hold the moved reference"

EXACT_ROWS = {"rollout_rs": "seq_max_exact", "rollout_rs_threshold": 0.1}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "trl": [
        NO_LOSS,
        (CISPO | {"loss_type": "dapo"}, "no lower bound"),
        (CISPO | {"epsilon": 1.0}, "mean over all tokens"),
        (IN_REWARD, "over the whole group"),
        ({"reference": "ema", "lora_r": 2}, MOVES),
        ({"reference": "periodic", "resume": True, "output_dir": "somewhere"}, MOVES),
        ({"max_steps": 0}, "no run without a step"),
        (OFTEN | {"target_kl": 0.1}, A_STEP),
        (OFTEN | {"kl_warmup_steps": 2}, A_STEP),
        (OFTEN | {"reference": "ema"}, A_STEP),
    ],
    "verl": [
        NO_LOSS,
        ({"loss_type": "grpo"}, "not with the mean of the others"),
        ({"dtype": "float16", "lora_r": 2}, "float16 loss was not tried"),
        ({"cpu": True}, "GPUs and NPUs"),
        ({"stop_on": ("kl-spike",)}, "no callback"),
        ({"lr_scheduler_type": "linear"}, "constant and cosine"),
    ],
}
CASES = [(backend, given, why) for backend, rows in REFUSED.items() for given, why in rows]

NOT_ALONE = [
    *((backend, {"reference": "sampler"}, "in its own loop") for backend in ("trl", "verl")),
    ("verl", {"sampler_url": "http://there:8000"}, "it is an option of trl"),
    ("verl", {"kl_estimator": "exact"}, "no logits"),
    ("verl", {"teacher_url": "http://there:8000"}, "teacher_url='http://there:8000' cannot be honoured by verl"),
    ("verl", {"teacher_model": "there", "temperature": 0.7}, "verl's teacher engine"),
    ("verl", {"teacher_model": "there", "reward": "none", "beta": 0.01}, "leaves out its policy loss"),
    ("trl", {"kl_early_stop": 0.1, "num_iterations": 2}, "cannot be honoured by TRL"),
    ("trl", {"reference": "remote", "reference_url": "http://there:8000"}, "cannot be honoured by TRL"),
    ("trl", {"teacher_kind": "ema"}, "cannot be honoured by TRL"),
    ("trl", {"teacher_model": "there", "num_generations": 1, "reward": "none"}, "compares the completions"),
    ("local", {"sampler": "vllm"}, "set backend to trl"),
    *((backend, EXACT_ROWS, "cannot be honoured by klamp train") for backend in ("local", "trl")),
    ("verl", {"dppo_mask": "dppo_tv"}, "verl has its own"),
    *((backend, {"reference": "adapter_off"}, "needs an adapter") for backend in ("local", "trl")),
    ("local", {"reference": "ema", "ref_model": "another"}, "does not use ref_model"),
]
"""What klamp's own loop cannot do either, or another rule of it refuses."""

ALLOWED = [
    ("local", {"reference": "adapter_off", "lora_r": 2}),
    ("local", {"reference": "adapter_off", "beta": 0.0}),
    ("trl", CISPO | {"loss_type": "bnpo", "epsilon": 1.0}),
    ("trl", IN_REWARD | {"advantage_baseline": "mean"}),
    ("trl", {"reference": "ema"}),
    ("trl", {"gradient_accumulation_steps": 8, "num_iterations": 3}),
    ("trl", {"sampler": "vllm"}),
    ("trl", {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.1, "dppo_mask": "dppo_kl"}),
    ("verl", {"verl_args": ["~data.seed", "+new.key=1"], "sampler": "vllm"}),
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


OTHER: dict[str, Any] = {
    "max_prompt_length": 10,
    "machines": 2,
    "ray_address": "auto",
    "verl_args": ["a=b"],
    "gpus": 2,
    "gpu_memory": 24.0,
    "sampler": "vllm",
    "sampler_url": "http://there:8000",
}


@pytest.mark.parametrize("field", OTHER)
def test_a_field_of_some_backends_is_refused_by_the_others(field):
    assert set(OTHER) == set(ONLY)
    for backend in ("local", "trl", "verl"):
        config = config_of(backend, {field: OTHER[field]})
        if backend in ONLY[field]:
            check_backend(config)
            continue
        with pytest.raises(ConfigError, match=f"backend='{backend}' cannot do this") as caught:
            check_backend(config)
        assert caught.value.got.startswith(f"{field}=") and f"set backend to {ONLY[field][0]}" in caught.value.fix
