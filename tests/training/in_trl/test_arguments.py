"""Every field of a run's configuration is one of TRL's arguments, is used by the program around them, or is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from klamp.config import KLConfig, TeacherConfig
from klamp.errors import ConfigError
from klamp.lab.backends import ONLY
from klamp.lab.config import TrainConfig
from klamp.lab.engines.trl_arguments import trl_arguments, weights_dtype
from klamp.lab.sizing import part_size
from klamp.lab.tasks.base import TaskConfig

FOLDER = Path("runs/one")

SHARED: dict[str, Any] = {"epsilon": 0.1, "epsilon_high": 0.28, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
SHARED |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 5, "num_iterations": 2}
SHARED |= {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95}
SHARED |= {"max_grad_norm": 0.5, "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "seed": 1}
SHARED |= {"max_steps": 7, "eval_every": 3, "save_every": 3, "keep_checkpoints": 3, "report_to": ("wandb",)}
"""Another value of each field that is translated; verl takes these too."""
TRANSLATED: dict[str, Any] = {**SHARED, "loss_type": "grpo", "surrogate": "cispo", "scale_rewards": "std"}
TRANSLATED |= {"mask_truncated_completions": True, "sampler": "vllm", "sampler_url": "http://there:8000"}
TRANSLATED |= {"lr_scheduler_type": "linear", "off_policy_mask_threshold": 0.5, "dtype": "bfloat16", "cpu": True}
TRANSLATED |= {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0}
TRANSLATED |= {"vllm_importance_sampling_clip_min": 0.5, "master_weights": "none", "output_dir": "elsewhere"}
TRANSLATED |= {"resume": True}
NEEDS: dict[str, dict[str, Any]] = {
    "surrogate": {"loss_type": "dapo", "epsilon": 1.0},
    "vllm_importance_sampling_clip_max": {"vllm_importance_sampling_mode": "token_mask"},
    "vllm_importance_sampling_clip_min": {"vllm_importance_sampling_mode": "token_mask"},
    "master_weights": {"dtype": "bfloat16"},
    "resume": {"output_dir": "elsewhere"},
}
"""Field -> the fields that it needs."""

AROUND = (
    *("model", "ref_model", "tokenizer", "lora_r", "lora_alpha", "lora_target_modules", "advantage_baseline"),
    *("log_completions", "log_completions_every", "log_answers", "stop_on", "backend", "gpus", "gpu_memory"),
)
"""Fields that the program, the launcher and --prepare use, besides those of the task."""
NEUTRAL = ("kl_early_stop", "reference_url", "reference_name")
"""Fields of which only the default can be honoured; see tests/training/test_backends.py."""


def arguments_of(**changes: Any) -> dict[str, Any]:
    config = TrainConfig.from_flat({"backend": "trl", **changes})
    return trl_arguments(config, Path(config.run.output_dir or FOLDER))


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_every_field_is_in_one_of_the_lists():
    kl = names_of(KLConfig) - set(NEUTRAL)
    of_verl = {name for name, who in ONLY.items() if "trl" not in who}
    lists = [set(TRANSLATED), kl, set(AROUND), names_of(TaskConfig), set(NEUTRAL), of_verl, names_of(TeacherConfig)]
    every = set(TrainConfig().flat()) - {"exact_kl_completions"}  # refused there
    assert every == set().union(*lists)
    assert sum(map(len, lists)) == len(every), "no field is in two of them"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("field", TRANSLATED)
def test_another_value_is_another_argument(field: str):
    needed = NEEDS.get(field, {})
    before = arguments_of(**{k: v for k, v in needed.items() if k != "epsilon"})
    assert arguments_of(**needed, **{field: TRANSLATED[field]}) != before


def test_the_fields_of_the_kl_keep_their_names_and_values():
    kl = KLConfig(beta=0.3, kl_clip_method="hard", kl_clip_threshold=0.05, kl_exclude_tokens=("1",), target_kl=0.1)
    arguments = arguments_of(**dataclasses.asdict(kl))
    names = {name for name, value in dataclasses.asdict(kl).items() if value is not None}
    assert {name: arguments[name] for name in names} == {name: getattr(kl, name) for name in names}


def test_without_a_kl_trl_is_told_of_none():
    arguments = arguments_of(beta=0.0)
    assert arguments["beta"] == 0.0
    assert not set(arguments) & (names_of(KLConfig) - {"beta"})
    assert "kl_estimator" in arguments_of(beta=0.0, kl_monitor=True)


@pytest.mark.parametrize(("ours", "theirs"), [("dapo", "dapo"), ("bnpo", "dapo"), ("grpo", "grpo")])
def test_loss_types_are_those_of_the_same_average(ours: str, theirs: str):
    arguments = arguments_of(loss_type=ours)
    assert (arguments["loss_type"], arguments["scale_rewards"]) == (theirs, "group")
    assert (arguments_of()["loss_type"], arguments_of()["scale_rewards"]) == ("dr_grpo", "none")


def test_the_ratio_bound_of_cispo_is_its_largest_value():
    arguments = arguments_of(surrogate="cispo", loss_type="dapo", epsilon=1.0, epsilon_high=0.28)
    assert (arguments["loss_type"], arguments["epsilon_high"]) == ("cispo", 1.28)


def test_updates_are_counted_where_klamp_counts_steps():
    arguments = arguments_of(max_steps=5, num_iterations=3, warmup_steps=2)
    assert (arguments["max_steps"], arguments["warmup_steps"]) == (15, 6)
    assert arguments_of(max_steps=5, warmup_steps=9)["warmup_steps"] == 5


@pytest.mark.parametrize(("processes", "size"), [(1, 64), (2, 32), (4, 16)])
def test_processes_and_parts_share_the_completions(processes: int, size: int):
    config = TrainConfig.from_flat({"backend": "trl", "gradient_accumulation_steps": 4})
    assert part_size(config, processes) == size
    arguments = trl_arguments(config, FOLDER, processes=processes)
    assert arguments["per_device_train_batch_size"] == size
    assert arguments["steps_per_generation"] == arguments["gradient_accumulation_steps"] == 4


def test_what_is_done_only_at_the_end_is_done_at_the_last_step():
    arguments = arguments_of(max_steps=5, num_iterations=2, eval_every=0, save_every=0)
    assert arguments["save_steps"] == arguments["eval_steps"] == arguments["max_steps"] == 10
    assert arguments_of(resume=True, output_dir="there")["eval_on_start"] is False


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("changes", "loaded", "mixed"),
    [
        ({}, "float32", False),
        ({"dtype": "bfloat16"}, "float32", True),
        ({"dtype": "bfloat16", "master_weights": "none"}, "bfloat16", False),
        ({"dtype": "bfloat16", "lora_r": 2}, "bfloat16", False),
    ],
)
def test_float32_copies_are_float32_weights_that_are_computed_in_bfloat16(changes, loaded, mixed, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert weights_dtype(TrainConfig.from_flat(changes).model) == loaded
    assert arguments_of(**changes)["bf16"] is mixed


def test_the_launcher_can_ask_for_bfloat16(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert arguments_of()["bf16"] is True


def test_completions_that_do_not_divide_are_refused():
    config = TrainConfig.from_flat({"backend": "trl", "prompts_per_step": 3})
    with pytest.raises(ConfigError, match="do not divide") as caught:
        part_size(config, 5)
    assert "multiple of 5" in str(caught.value)


def test_vllm_is_colocated_or_a_server():
    here, there = arguments_of(sampler="vllm"), arguments_of(sampler_url="http://there:8000")
    assert (here["use_vllm"], here["vllm_mode"]) == (True, "colocate")
    assert (there["use_vllm"], there["vllm_mode"]) == (True, "server")
    assert there["vllm_server_base_url"] == "http://there:8000"
    assert arguments_of()["use_vllm"] is False


def test_trl_knows_every_argument():
    from klamp.hosts.trl.grpo_config import GRPOConfig

    arguments = arguments_of(sampler_url="http://there:8000", target_kl=0.1, gradient_checkpointing=True)
    assert set(arguments) <= {field.name for field in dataclasses.fields(GRPOConfig)}
