"""What verl cannot do is refused by name, before any work, and is fine in klamp's own."""

from __future__ import annotations

import pytest

from klamp.errors import ConfigError
from klamp.training.config import TrainConfig
from klamp.training.verl_refusals import OF_VERL

REFUSED = [
    ({"surrogate": "score_function"}, "no such loss"),
    ({"loss_type": "grpo"}, "not where it is that of the others"),
    ({"ref_model": "another"}, "the model itself"),
    ({"dtype": "float16", "lora_r": 2}, "float16 was not tried"),
    ({"cpu": True}, "GPUs and NPUs"),
    ({"exact_kl_completions": 1}, "sampled tokens alone"),
    ({"mask_truncated_completions": True}, "every completion"),
    ({"max_steps": 0}, "no run without a step"),
    ({"lr_scheduler_type": "linear"}, "constant and cosine"),
    ({"gradient_accumulation_steps": 3}, "parts of the same size"),
]

ONLY_HERE = [
    ({"sampler_url": "http://there:8000"}, "starts its own engines"),
    ({"gpus": 3}, "a multiple of 3"),
    ({"verl_args": ["trainer.save_freq"]}, "KEY=VALUE"),
    ({"kl_estimator": "exact"}, "no logits"),
]

VALUES = {
    "max_prompt_length": 10,
    "gpus": 2,
    "machines": 2,
    "ray_address": "auto",
    "stall_timeout": 10.0,
    "verl_args": ["a=b"],
}


def given(**values):
    return TrainConfig.from_flat(values)


@pytest.mark.parametrize(("values", "why"), [*REFUSED, *ONLY_HERE], ids=str)
def test_what_verl_cannot_do_is_refused_with_the_way_out(values, why):
    with pytest.raises(ConfigError, match="verl") as caught:
        given(backend="verl", **values)
    assert why in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("values", [values for values, _ in REFUSED], ids=str)
def test_it_is_fine_in_klamps_own_loop(values):
    given(**values)


@pytest.mark.parametrize("backend", ["local", "trl", "tinker"])
@pytest.mark.parametrize("field", OF_VERL)
def test_what_says_how_verl_is_started_means_nothing_elsewhere(field, backend):
    model = {"model": "Qwen/Qwen3-8B"} if backend == "tinker" else {}
    with pytest.raises(ConfigError, match=f"backend='{backend}' cannot do this") as caught:
        given(backend=backend, **model, **{field: VALUES[field]})
    assert caught.value.got.startswith(f"{field}=")
    given(backend="verl", **{field: VALUES[field]})


def test_what_takes_a_default_away_is_not_refused():
    given(backend="verl", verl_args=["~data.seed", "+new.key=1"], sampler="vllm", exact_kl_completions=0)
