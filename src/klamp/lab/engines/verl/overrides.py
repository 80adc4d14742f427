"""The arguments of `verl.trainer.main_ppo` that a run's configuration means, and the files between klamp and verl.

Nothing of verl is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from klamp.config import LossConfig
from klamp.config.loss import LOSS_TYPES
from klamp.core.types import Reduction
from klamp.hosts.verl.overrides import ACTOR, DISTILLATION, overrides, places, written
from klamp.lab.config import TrainConfig
from klamp.lab.folders import CHECKPOINTS, FOR_VERL
from klamp.lab.models import model_path, shape_of
from klamp.lab.sizing import Load, Shape, Sizes, load_of, part_size, sizes_of
from klamp.lab.tasks.base import NO_REWARD

PROGRAM = ("-m", "verl.trainer.main_ppo")
"""What Python runs."""
AVERAGES: Mapping[Reduction, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}
"""klamp's average over tokens -> verl's loss_agg_mode of the same."""
AS_IT_STANDS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing: klamp's prompts are ready to be tokenized."""
TEACHER = "klamp_teacher"
"""The column that holds the key of a prompt's teacher."""

MODEL, ROLLOUT, REF = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
REWARD, CHECKPOINT = "reward.custom_reward_function", f"{ACTOR}.checkpoint"
RESUMED = ("model", "optimizer", "extra")
"""The shards that verl continues from."""
ENVIRONMENT = "+ray_kwargs.ray_init.runtime_env.env_vars"
SAME: Mapping[str, tuple[str, ...]] = {
    "prompts_per_step": ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),  # an update takes the whole step
    "max_prompt_length": ("data.max_prompt_length",),
    "max_completion_length": ("data.max_response_length",),
    "seed": ("data.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed", f"{ROLLOUT}.seed"),
    "learning_rate": (f"{ACTOR}.optim.lr",),
    "lr_scheduler_type": (f"{ACTOR}.optim.lr_scheduler_type",),
    "weight_decay": (f"{ACTOR}.optim.weight_decay",),
    "num_iterations": (f"{ACTOR}.ppo_epochs",),
    "gradient_checkpointing": (f"{MODEL}.enable_gradient_checkpointing",),
    "dtype": (f"{ROLLOUT}.dtype",),
    "num_generations": (f"{ROLLOUT}.n",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "top_p": (f"{ROLLOUT}.top_p",),
    "epsilon": (f"{ACTOR}.clip_ratio_low",),
    "max_steps": ("trainer.total_training_steps",),
    "machines": ("trainer.nnodes",),
    "gpus": ("trainer.n_gpus_per_node",),
    "keep_checkpoints": ("trainer.max_actor_ckpt_to_keep",),
}
"""Field -> verl's names of the same value."""
ALWAYS: Mapping[str, Any] = {
    "data.shuffle": False,  # the rows are those of all steps, in klamp's order
    f"{ACTOR}.shuffle": False,
    f"{REWARD}.path": "pkg://klamp.lab.engines.verl.data",
    f"{REWARD}.name": "score",
    f"{MODEL}.custom_chat_template": AS_IT_STANDS,
    f"{ACTOR}.clip_ratio_c": 1e9,  # verl's second bound of the ratio out of reach: klamp's loss has none
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    "critic.enable": False,
    "trainer.total_epochs": 1,
    "trainer.project_name": "klamp",
    "++trainer.checkpoint_callback_class": "klamp.verl.Driver",
    f"{CHECKPOINT}.load_contents": RESUMED,
}


class Layout:
    """The files between klamp and verl, in the folder of a run; every machine of the cluster has to see them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.absolute()
        self.metrics, self.tensorboard = self.root / "verl.jsonl", self.root / "tensorboard"
        self.checkpoints = self.root / CHECKPOINTS
        inner = self.root / FOR_VERL
        self.train, self.held_out = inner / "train.parquet", inner / "held-out.parquet"
        self.task, self.tokenizer, self.hydra = inner / "task.json", inner / "tokenizer", inner / "hydra"
        self.rollouts, self.answers = inner / "rollouts", inner / "answers"


def verl_overrides(config: TrainConfig, folder: Path, shape: Shape | None = None) -> list[str]:
    """The words behind `python -m verl.trainer.main_ppo`, each key once; the user's own come last, and win.

    Without a `shape` the model is a small one, whose sizes are left at verl's defaults.
    """
    layout, sizes = Layout(folder), None if shape is None else sizes_of(load_in_verl(config, shape))
    given = config.flat()
    values = {
        **ALWAYS,
        **{key: given[name] for name, keys in SAME.items() for key in keys},
        **_files(config, layout),
        **_model(config),
        **_steps(config),
        **_loss(config.loss, config.rollout.max_completion_length),
        **({} if sizes is None else _sized(config, sizes)),
        **_teacher(config),
    }
    part = part_size(config, config.run.gpus * config.run.machines)
    part = part if sizes is None else sizes.micro
    values |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": part}
    values |= {f"{place}.log_prob_micro_batch_size_per_gpu": part for place in (REF, ROLLOUT)}
    words = [f"{key}={written(value)}" for key, value in values.items()]
    return _once([*overrides(config.kl, config.teacher), *words, *config.run.verl_args])


def command(config: TrainConfig, folder: Path, python: str) -> list[str]:
    """The whole command, by an interpreter, with the sizes that the model needs."""
    return [python, *PROGRAM, *verl_overrides(config, folder, shape_of(config.model.model))]


def _files(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    run = config.run
    return {
        "data.train_files": str(layout.train),
        "data.val_files": str(layout.held_out),
        f"+{REWARD}.reward_kwargs.task": str(layout.task),
        f"{MODEL}.tokenizer_path": str(layout.tokenizer),
        "trainer.experiment_name": layout.root.name,
        "trainer.default_local_dir": str(layout.checkpoints),
        "trainer.logger": ("console", "file", *run.report_to),
        **({"trainer.rollout_data_dir": str(layout.rollouts)} if run.log_completions else {}),
        **({"trainer.validation_data_dir": str(layout.answers)} if run.log_answers else {}),
        f"{ENVIRONMENT}.VERL_FILE_LOGGER_PATH": str(layout.metrics),
        f"{ENVIRONMENT}.TENSORBOARD_DIR": str(layout.tensorboard),
        "hydra.run.dir": str(layout.hydra),
        # Ray's own default is whatever cluster it finds on the machine, or has been left a note of
        "+ray_kwargs.ray_init.address": run.ray_address or "local",
    }


def _model(config: TrainConfig) -> dict[str, Any]:
    model, name = config.model, {"float32": "fp32", "bfloat16": "bf16"}[config.model.dtype]
    alone, targets = model.master_weights == "none" and not model.lora_r, model.lora_target_modules
    computed = {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    adapter = {
        f"{MODEL}.lora_rank": model.lora_r,
        f"{MODEL}.lora_alpha": model.lora_alpha,
        f"{MODEL}.target_modules": "all-linear" if targets == ("all-linear",) else targets,
        f"{ROLLOUT}.load_format": "safetensors",  # only the adapter travels to the engine
    }
    return {
        f"{MODEL}.path": model_path(model.model),
        **(adapter if model.lora_r else {}),
        f"{ACTOR}.fsdp_config.model_dtype": name if alone else "fp32",
        f"+{ACTOR}.fsdp_config.mixed_precision": computed,
        f"+{REF}.fsdp_config.mixed_precision": computed,
        # with all weights the model as it is loaded, beside the shards
        f"{CHECKPOINT}.save_contents": (*RESUMED, *(() if model.lora_r else ("hf_model",))),
    }


def _steps(config: TrainConfig) -> dict[str, Any]:
    optim, run = config.optim, config.run
    return {
        f"{ACTOR}.optim.lr_warmup_steps": min(optim.warmup_steps, run.max_steps),
        f"{ACTOR}.optim.betas": (optim.adam_beta1, optim.adam_beta2),
        f"{ACTOR}.optim.clip_grad": optim.max_grad_norm or float("inf"),
        f"{ROLLOUT}.top_k": config.rollout.top_k or -1,
        "trainer.save_freq": run.save_every or run.max_steps,
        "trainer.test_freq": run.eval_every or run.max_steps,
        "trainer.val_before_train": not run.resume,
        "trainer.resume_mode": "auto" if run.resume else "disable",
    }


def load_in_verl(config: TrainConfig, shape: Shape) -> Load:
    """What the run asks of its GPUs, all of which train, and sample in between."""
    gpus, prompt = config.run.gpus * config.run.machines, config.rollout.max_prompt_length
    return load_of(config, shape, gpus=gpus, prompt=prompt, apart=False)


def _sized(config: TrainConfig, sizes: Sizes) -> dict[str, Any]:
    """What a large model needs set otherwise."""
    return {
        f"{MODEL}.enable_gradient_checkpointing": config.model.gradient_checkpointing or sizes.checkpointing,
        f"{ACTOR}.fsdp_config.param_offload": sizes.offload,
        f"{ACTOR}.fsdp_config.optimizer_offload": sizes.offload,
        f"{REF}.fsdp_config.param_offload": True,  # needed once a step
        f"{ROLLOUT}.gpu_memory_utilization": sizes.engine_share,
        f"{ROLLOUT}.tensor_model_parallel_size": sizes.tensor_parallel,
    }


def _loss(loss: LossConfig, longest: int) -> dict[str, Any]:
    reduction, estimator = LOSS_TYPES[loss.loss_type].reduction, "algorithm.adv_estimator"
    scaled = {estimator: "grpo", "algorithm.norm_adv_by_std_in_grpo": loss.scale == "std"}
    return {
        **({estimator: "rloo"} if loss.advantage_baseline == "leave_one_out" else scaled),
        f"{ACTOR}.loss_agg_mode": AVERAGES[reduction],
        f"{ACTOR}.clip_ratio_high": loss.clip_high,
        **({f"{ACTOR}.loss_scale_factor": longest} if reduction == "fixed_length" else {}),
        **({f"{ACTOR}.policy_loss.loss_mode": "cispo"} if loss.surrogate == "cispo" else {}),
    }


def _teacher(config: TrainConfig) -> dict[str, Any]:
    """Where the teachers' weights are, what a row of the data names its own by, and that there is no other reward."""
    if not config.teacher.there:
        return {}
    paths = map(model_path, config.teacher.models.values())
    values = {f"{place}.model_path": path for place, path in zip(places(config.teacher), paths, strict=True)}
    keyed = {f"{DISTILLATION}.teacher_key": TEACHER} if config.teacher.teacher_key else {}
    silent = config.task.reward == NO_REWARD
    return values | keyed | ({f"{DISTILLATION}.distillation_loss.use_task_rewards": False} if silent else {})


def _once(words: Iterable[str]) -> list[str]:
    """Each key at its last value; a key that is deleted (~KEY) stands as it was given."""
    last: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        last.pop(key, None)
        last[key] = word
    return list(last.values())
