"""What klamp and verl tell each other: where their files lie, and the arguments of `verl.trainer.main_ppo`.

Nothing of verl is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from klamp.config import LossConfig
from klamp.config.loss import LOSS_TYPES
from klamp.core.types import Reduction
from klamp.hosts.verl.fields_in_verl import written
from klamp.hosts.verl.overrides import ACTOR, overrides
from klamp.hosts.verl.teacher import DISTILLATION, places
from klamp.tasks.base import NO_REWARD
from klamp.training.config import OptimConfig, TrainConfig
from klamp.training.folders import CHECKPOINTS, FOR_VERL
from klamp.training.models import model_path
from klamp.training.sizing import Load, Shape, Sizes, load_of, sizes_of

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

NO_DUAL_CLIP = 1e9
"""verl's second bound of the ratio, where advantages are negative, out of reach: klamp's loss has none."""

MODEL, ROLLOUT, REWARD = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "reward.custom_reward_function"
CHECKPOINT, RESUMED = "actor_rollout_ref.actor.checkpoint", ("model", "optimizer", "extra")
TEACHER = "klamp_teacher"
"""The column that holds the key of a prompt's teacher."""
TOLD = "+ray_kwargs.ray_init.runtime_env.env_vars"


class Layout:
    """The files between klamp and verl.

    Args:
        folder: of the run; every machine of the cluster has to see it under this path.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder.absolute()
        self.output = self.root / "log.txt"
        """What verl's processes print."""
        inner = self.root / FOR_VERL
        self.train, self.held_out = inner / "train.parquet", inner / "held-out.parquet"
        self.task = inner / "task.json"
        """What the reward function opens the task with."""
        self.tokenizer = inner / "tokenizer"
        self.metrics = inner / "metrics.jsonl"
        """verl's file log."""
        self.rollouts, self.answers = inner / "rollouts", inner / "answers"
        """Completions of each step, and those of each evaluation."""
        self.hydra = inner / "hydra"
        self.checkpoints = self.root / CHECKPOINTS
        self.newest = self.checkpoints / "latest_checkpointed_iteration.txt"
        """The step of the newest whole checkpoint; verl writes it last."""

    def checkpoint(self, step: int) -> Path:
        """The folder of verl's checkpoint after a step."""
        return self.checkpoints / f"global_step_{step}"

    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0: there is none."""
        try:
            return int(self.newest.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or just being written
            return 0


def verl_overrides(config: TrainConfig, folder: Path, shape: Shape | None = None) -> list[str]:
    """The words behind `python -m verl.trainer.main_ppo`, each key once; the user's own come last, and win.

    Args:
        config: the run.
        folder: of the run.
        shape: of the model; None: a small one, whose sizes are left at verl's defaults.

    Raises:
        ConfigError: a KL that verl has no place for.
    """
    layout, sizes = Layout(folder), None if shape is None else sizes_of(load_in_verl(config, shape))
    values = {
        **_data(config, layout),
        **_model(config, layout),
        **_optimizer(config.optim, config.run.max_steps),
        **_updates(config, part_size(config) if sizes is None else sizes.micro),
        **_rollout(config),
        **_reward(layout),
        **_trainer(config, layout),
        **({} if sizes is None else _sized(config, sizes)),
    }
    mine = [f"{key}={written(value)}" for key, value in values.items()]
    kl = overrides(config.kl, config.teacher)
    return _once([*mine, *kl, *_loss(config), *_teacher(config), *config.run.verl_args])


def command(config: TrainConfig, folder: Path, python: str, shape: Shape | None = None) -> list[str]:
    """The whole command, word for word.

    Args:
        config: the run.
        folder: of the run.
        python: the interpreter.
        shape: of the model; None: a small one.
    """
    return [python, *PROGRAM, *verl_overrides(config, folder, shape)]


def _data(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    rollout, run = config.rollout, config.run
    return {
        "data.train_files": str(layout.train),
        "data.val_files": str(layout.held_out),
        "data.train_batch_size": rollout.prompts_per_step,
        "data.max_prompt_length": rollout.max_prompt_length,
        "data.max_response_length": rollout.max_completion_length,
        "data.shuffle": False,  # the rows are those of all steps, in klamp's order
        "data.seed": run.seed,
    }


def _model(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    model, name = config.model, {"float32": "fp32", "bfloat16": "bf16"}[config.model.dtype]
    alone = model.master_weights == "none" and not model.lora_r
    computed = {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    adapter = {
        f"{MODEL}.lora_rank": model.lora_r,
        f"{MODEL}.lora_alpha": model.lora_alpha,
        f"{MODEL}.target_modules": model.lora_target_modules
        if model.lora_target_modules != ("all-linear",)
        else "all-linear",
        f"{ROLLOUT}.load_format": "safetensors",  # only the adapter travels to the engine
    }
    return {
        f"{MODEL}.path": model_path(config.model.model),
        f"{MODEL}.tokenizer_path": str(layout.tokenizer),
        f"{MODEL}.custom_chat_template": AS_IT_STANDS,
        f"{MODEL}.enable_gradient_checkpointing": model.gradient_checkpointing,
        **(adapter if model.lora_r else {}),
        f"{ACTOR}.fsdp_config.model_dtype": name if alone else "fp32",
        f"+{ACTOR}.fsdp_config.mixed_precision": computed,
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision": computed,
        f"{ACTOR}.fsdp_config.seed": config.run.seed,
        f"{ROLLOUT}.dtype": model.dtype,
    }


def _optimizer(optim: OptimConfig, steps: int) -> dict[str, Any]:
    """verl advances its schedule once a step, as klamp does, and its cosine and warm-up are those of klamp."""
    return {
        f"{ACTOR}.optim.lr": optim.learning_rate,
        f"{ACTOR}.optim.lr_scheduler_type": optim.lr_scheduler_type,
        f"{ACTOR}.optim.lr_warmup_steps": min(optim.warmup_steps, steps),
        f"{ACTOR}.optim.weight_decay": optim.weight_decay,
        f"{ACTOR}.optim.betas": (optim.adam_beta1, optim.adam_beta2),
        f"{ACTOR}.optim.clip_grad": optim.max_grad_norm or float("inf"),
    }


def _updates(config: TrainConfig, part: int) -> dict[str, Any]:
    """Every update takes the whole step, in parts; verl counts the mini-batch in prompts."""
    return {
        f"{ACTOR}.ppo_mini_batch_size": config.rollout.prompts_per_step,
        f"{ACTOR}.ppo_epochs": config.optim.num_iterations,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": part,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": part,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": part,
        f"{ACTOR}.shuffle": False,
        f"{ACTOR}.data_loader_seed": config.run.seed,
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
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,  # needed once a step
        f"{ROLLOUT}.gpu_memory_utilization": sizes.engine_share,
        f"{ROLLOUT}.tensor_model_parallel_size": sizes.tensor_parallel,
    }


def part_size(config: TrainConfig) -> int:
    """Completions that a GPU computes at once."""
    run, parts = config.run, config.optim.gradient_accumulation_steps
    return config.rollout.prompts_per_step * config.rollout.num_generations // (run.gpus * run.machines * parts)


def _rollout(config: TrainConfig) -> dict[str, Any]:
    rollout = config.rollout
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.n": rollout.num_generations,
        f"{ROLLOUT}.temperature": rollout.temperature,
        f"{ROLLOUT}.top_p": rollout.top_p,
        f"{ROLLOUT}.top_k": rollout.top_k or -1,
        f"{ROLLOUT}.seed": config.run.seed,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.val_kwargs.do_sample": False,
        f"{ROLLOUT}.val_kwargs.temperature": 0,
    }


def _reward(layout: Layout) -> dict[str, Any]:
    return {
        f"{REWARD}.path": "pkg://klamp.training.in_verl.data",
        f"{REWARD}.name": "score",
        f"+{REWARD}.reward_kwargs.task": str(layout.task),
    }


def _trainer(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    run = config.run
    completions = {"trainer.rollout_data_dir": str(layout.rollouts)} if run.log_completions else {}
    answers = {"trainer.validation_data_dir": str(layout.answers)} if run.log_answers else {}
    return {
        "critic.enable": False,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": run.max_steps,
        "trainer.nnodes": run.machines,
        "trainer.n_gpus_per_node": run.gpus,
        "trainer.save_freq": run.save_every or run.max_steps,
        "trainer.test_freq": run.eval_every or run.max_steps,
        "trainer.val_before_train": not run.resume,
        # the shards to go on from; with all weights, beside them the model as it is loaded
        f"{CHECKPOINT}.save_contents": (*RESUMED, *(() if config.model.lora_r else ("hf_model",))),
        f"{CHECKPOINT}.load_contents": RESUMED,
        "trainer.max_actor_ckpt_to_keep": run.keep_checkpoints,
        "trainer.resume_mode": "auto" if run.resume else "disable",
        "trainer.default_local_dir": str(layout.checkpoints),
        "trainer.logger": ("console", "file"),
        "trainer.project_name": "klamp",
        "trainer.experiment_name": layout.root.name,
        **completions,
        **answers,
        # Ray's own default is whatever cluster it finds on the machine, or has been left a note of
        "+ray_kwargs.ray_init.address": run.ray_address or "local",
        f"{TOLD}.VERL_FILE_LOGGER_PATH": str(layout.metrics),
        "hydra.run.dir": str(layout.hydra),
    }


def _loss(config: TrainConfig) -> list[str]:
    loss = config.loss
    reduction = LOSS_TYPES[loss.loss_type].reduction
    fixed = {f"{ACTOR}.loss_scale_factor": config.rollout.max_completion_length} if reduction == "fixed_length" else {}
    values = {
        **_advantages(loss),
        f"{ACTOR}.loss_agg_mode": AVERAGES[reduction],
        **fixed,
        f"{ACTOR}.clip_ratio_low": loss.epsilon,
        f"{ACTOR}.clip_ratio_high": loss.clip_high,
        f"{ACTOR}.clip_ratio_c": NO_DUAL_CLIP,
        **({f"{ACTOR}.policy_loss.loss_mode": "cispo"} if loss.surrogate == "cispo" else {}),
    }
    return [f"{key}={written(value)}" for key, value in values.items()]


def _teacher(config: TrainConfig) -> list[str]:
    """Where the teachers' weights are, what a row of the data names its own by, and that there is no other reward."""
    if not config.teacher.there:
        return []
    paths = [model_path(name) for name in config.teacher.models.values()]
    values = {f"{place}.model_path": path for place, path in zip(places(config.teacher), paths, strict=True)}
    if config.teacher.teacher_key:
        values[f"{DISTILLATION}.teacher_key"] = TEACHER
    words = [f"{key}={written(value)}" for key, value in values.items()]
    silent = config.task.reward == NO_REWARD
    return words + [f"{DISTILLATION}.distillation_loss.use_task_rewards=False"] * silent


def _advantages(loss: LossConfig) -> dict[str, Any]:
    if loss.advantage_baseline == "leave_one_out":
        return {"algorithm.adv_estimator": "rloo"}
    return {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": loss.scale == "std"}


def _once(words: Iterable[str]) -> list[str]:
    """Each key at its last value; a key that is deleted (~KEY) stands as it was given."""
    last: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        last.pop(key, None)
        last[key] = word
    return list(last.values())
