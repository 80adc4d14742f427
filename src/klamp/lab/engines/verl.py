"""`klamp train --backend verl`: verl's arguments, its data files and its reward. Nothing of verl is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.config import LossConfig
from klamp.config.loss import LOSS_TYPES
from klamp.core.types import Reduction
from klamp.hosts.verl.effective_in_verl import REDUCTIONS
from klamp.hosts.verl.overrides import ACTOR, DISTILLATION, overrides, places, written
from klamp.lab.anchors import check_keys, check_tokens_of
from klamp.lab.config import TrainConfig
from klamp.lab.folders import CHECKPOINTS, FOR_VERL
from klamp.lab.models import check_weights, configuration, load_tokenizer, make_ready, max_length, model_path, shape_of
from klamp.lab.sampling import examples_of_run
from klamp.lab.setup import load_prompts
from klamp.lab.sizing import Load, Shape, Sizes, load_of, part_size, sizes_of
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import NO_REWARD, Example, Task, TaskConfig
from klamp.lab.tasks.files import check_prompts

AVERAGES: Mapping[Reduction, str] = {reduction: mode for mode, reduction in REDUCTIONS.items()}
"""klamp's average over tokens -> verl's equal loss_agg_mode."""
AS_IT_STANDS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing: klamp's prompts are ready to be tokenized."""
TEACHER = "klamp_teacher"  # the column that holds the key of a prompt's teacher

MODEL, ROLLOUT, REF = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
REWARD, CHECKPOINT = "reward.custom_reward_function", f"{ACTOR}.checkpoint"
MICRO = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    *(f"{place}.log_prob_micro_batch_size_per_gpu" for place in (REF, ROLLOUT)),
)
"""The names of how many completions a GPU computes at once."""
RESUMED = ("model", "optimizer", "extra")  # the shards that verl continues from
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
    "data.shuffle": False,  # the rows of all steps, in klamp's order
    f"{ACTOR}.shuffle": False,
    f"{REWARD}.path": "pkg://klamp.lab.engines.verl",
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
    "trainer.project_name": os.environ.get("WANDB_PROJECT", "klamp"),
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
    """The words behind `python -m verl.trainer.main_ppo`; without a `shape` the sizes are verl's defaults."""
    fields, part = config.flat(), part_size(config, config.run.gpus * config.run.machines)
    sizes = None if shape is None else sizes_of(load_in_verl(config, shape))
    values = {
        **ALWAYS,
        **{key: fields[name] for name, keys in SAME.items() for key in keys},
        **dict.fromkeys(MICRO, part if sizes is None else sizes.micro),
        **_run(config, Layout(folder)),
        **_model(config),
        **_loss(config.loss, config.rollout.max_completion_length),
        **({} if sizes is None else _sized(config, sizes)),
        **_teacher(config),
    }
    words = [f"{key}={written(value)}" for key, value in values.items()]
    return _once([*overrides(config.kl, config.teacher), *words, *config.run.verl_args])


def command(config: TrainConfig, folder: Path, python: str) -> list[str]:
    """The command that starts verl for a run."""
    return [python, "-m", "verl.trainer.main_ppo", *verl_overrides(config, folder, shape_of(config.model.model))]


def _run(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """The files of a run, its steps, and where its processes start."""
    optim, run = config.optim, config.run
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
        # Ray's own default is any cluster that it finds on the machine or in its notes
        "+ray_kwargs.ray_init.address": run.ray_address or "local",
        f"{ACTOR}.optim.lr_warmup_steps": min(optim.warmup_steps, run.max_steps),
        f"{ACTOR}.optim.betas": (optim.adam_beta1, optim.adam_beta2),
        f"{ACTOR}.optim.clip_grad": optim.max_grad_norm or float("inf"),
        f"{ROLLOUT}.top_k": config.rollout.top_k or -1,
        "trainer.save_freq": run.save_every or run.max_steps,
        "trainer.test_freq": run.eval_every or run.max_steps,
        "trainer.val_before_train": not run.resume,
        "trainer.resume_mode": "auto" if run.resume else "disable",
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
        # with all weights also the loadable model, beside the shards
        f"{CHECKPOINT}.save_contents": (*RESUMED, *(() if model.lora_r else ("hf_model",))),
    }


def load_in_verl(config: TrainConfig, shape: Shape) -> Load:
    """What the run asks of its GPUs, all of which train, and sample in between."""
    gpus, prompt = config.run.gpus * config.run.machines, config.rollout.max_prompt_length
    return load_of(config, shape, gpus=gpus, prompt=prompt, apart=False)


def _sized(config: TrainConfig, sizes: Sizes) -> dict[str, Any]:
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
    """The folders of the teachers, the column that names the teacher of a row, and whether there is a reward."""
    if not config.teacher.there:
        return {}
    paths = map(model_path, config.teacher.models.values())
    values = {f"{place}.model_path": path for place, path in zip(places(config.teacher), paths, strict=True)}
    keyed = {f"{DISTILLATION}.teacher_key": TEACHER} if config.teacher.teacher_key else {}
    silent = config.task.reward == NO_REWARD
    return values | keyed | ({f"{DISTILLATION}.distillation_loss.use_task_rewards": False} if silent else {})


def _once(words: Iterable[str]) -> list[str]:
    """Each key at its last value; a deleted key (~KEY) stays."""
    last: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        last.pop(key, None)
        last[key] = word
    return list(last.values())


def write_inputs(config: TrainConfig, layout: Layout) -> None:
    """Check that model, task and teachers fit together, and write what verl reads."""
    models = config.teacher.models if config.teacher.there else {}
    for name in (config.model.model, *models.values()):
        make_ready(name)
        check_weights(model_path(name))
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    # verl would cut a longer prompt, or stop at it in the middle of the run
    room = config.rollout.max_prompt_length + config.rollout.max_completion_length
    longest = max_length(configuration(model_path(config.model.model)))
    task = load_prompts(config, tokenizer, longest=min(longest or room, room))
    if models:
        check_keys(config, task, models)
    for name in models.values():
        longest = max_length(configuration(model_path(name)))
        check_prompts(task.train, tokenizer, longest, config.rollout.max_completion_length + 1)  # verl's takes one more
        check_tokens_of(name, tokenizer)
    write_data(config, task, tokenizer, layout)


def write_data(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> None:
    """Write the prompts, the tokenizer, and what the reward function opens the task with."""
    import pyarrow
    from pyarrow import parquet

    layout.train.parent.mkdir(parents=True, exist_ok=True)
    if layout.metrics.exists():  # verl writes its log anew
        number = 1 + len(list(layout.train.parent.glob("log-before-resume-*")))
        layout.metrics.rename(layout.train.parent / f"log-before-resume-{number}.jsonl")
    tokenizer.save_pretrained(str(layout.tokenizer))
    opening = {"task": dataclasses.asdict(config.task), "tokenizer": str(layout.tokenizer), "folder": str(Path.cwd())}
    layout.task.write_text(json.dumps(opening, indent=2), encoding="utf-8")
    for file, rows in ((layout.train, training_rows(config, task)), (layout.held_out, held_out_rows(task))):
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def training_rows(config: TrainConfig, task: Task) -> Iterator[dict[str, Any]]:
    """The prompts of all steps, in the order of klamp's own loop."""
    key = config.teacher.teacher_key
    for i in examples_of_run(config, len(task.train)):
        teacher = {TEACHER: str(task.train[i].fields.get(key))} if key else {}
        yield row_of(task.train[i], skill=task.rl_skill) | teacher


def held_out_rows(task: Task) -> Iterator[dict[str, Any]]:
    """The held-out prompts of every skill that is scored by an answer; verl cannot hold the prompts of `Task.read`."""
    for skill, examples in task.evaluation.items():
        yield from (row_of(example, skill=skill) for example in examples if skill not in task.read)


def row_of(example: Example, *, skill: str) -> dict[str, Any]:
    """A prompt as a row of verl's: one message, which the template does not change, and all that a reward needs."""
    return {
        "data_source": skill,
        "prompt": [{"role": "user", "content": example.prompt}],
        "ability": skill,
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"example": json.dumps(dataclasses.asdict(example), default=str)},
    }


_lock = threading.Lock()


def score(data_source: str, solution_str: str, *, extra_info: Mapping[str, Any], task: str, **others: Any) -> float:
    """The reward of a completion, for a prompt that `row_of` wrote and the task file of `write_data`; verl calls it."""
    with _lock:  # verl asks from several threads
        return open_task(task).score(Example(**json.loads(extra_info["example"])), solution_str)


@functools.cache
def open_task(file: str) -> Task:
    """The task of a run, loaded once per process, in the folder that the run was started from."""
    opening = json.loads(Path(file).read_text(encoding="utf-8"))
    if opening["folder"] not in sys.path:
        sys.path.append(opening["folder"])  # for a reward MODULE:FUNCTION
    with chdir(opening["folder"]):  # for data files
        return load_task(TaskConfig(**opening["task"]), load_tokenizer(opening["tokenizer"]))
