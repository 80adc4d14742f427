"""`klamp train --backend trl`: a configuration of klamp, run by TRL's GRPO with klamp's KL in it.

Models, task, prompts and their order, rewards, advantages, optimizer, schedule, evaluation, metrics and the run's
folder are those of klamp's own loop. Generation, the loss with klamp's KL in it, the backward pass, processes and
checkpoints are TRL's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from klamp.hosts.common.versions import check_version

check_version("trl")

import torch  # noqa: E402  (the version is checked before TRL is opened up)
from accelerate import Accelerator  # noqa: E402

from klamp.config import build_objective  # noqa: E402
from klamp.errors import ConfigError, KLWarning, MissingLibrary  # noqa: E402
from klamp.hosts.common.exclusions import excluded_ids  # noqa: E402
from klamp.hosts.common.sampler_weights import pack_nothing  # noqa: E402
from klamp.hosts.trl.grpo_config import GRPOConfig  # noqa: E402
from klamp.tasks.prompts import chat_cautions  # noqa: E402
from klamp.training.checkpoint import OF_TRL, whole_newest  # noqa: E402
from klamp.training.config import TrainConfig  # noqa: E402
from klamp.training.context import Context  # noqa: E402
from klamp.training.in_trl.arguments import part_size, trl_arguments  # noqa: E402
from klamp.training.in_trl.data import dataset_of, reward_function  # noqa: E402
from klamp.training.in_trl.run import TRLRun  # noqa: E402
from klamp.training.in_trl.split import check_fsdp_version, is_used  # noqa: E402
from klamp.training.in_trl.trainer import RunTrainer  # noqa: E402
from klamp.training.models import adapter_config, adapter_errors, former_names, output_size  # noqa: E402
from klamp.training.observers import Observer, RunSummary  # noqa: E402
from klamp.training.processes import explained  # noqa: E402
from klamp.training.runlog import RunLog, begin_trackers  # noqa: E402
from klamp.training.setup import (  # noqa: E402
    Start,
    load_reference,
    load_start,
    make_accelerator,
    on_cpu,
    opened_folder,
)


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration with backend `trl` to its last step, from TRL's newest checkpoint if it is to be resumed.

    In one process, or in those that torchrun or `accelerate launch` starts.

    Args:
        config: what to run.
        observers: told what happens; the run's folder and trackers are served besides.

    Raises:
        UnsupportedVersion: vLLM is asked for and missing; before any work.
        KlampError: bad input before any work, or an error in the run; see `klamp.errors`.
    """
    check_vllm(config)
    check_fsdp_version()
    check_devices(config)
    with explained(config), opened_folder(config) as folder:
        accelerator = make_accelerator(config, folder)
        try:
            part_size(config, accelerator.num_processes)
            check_split(config, accelerator)
            if config.run.resume:
                whole_newest(folder, begin=OF_TRL)
            start = load_start(config, accelerator, observers)
            context = context_of(config, folder, accelerator, start)
            run = TRLRun(context, [RunLog(accelerator), *observers], trainer_of(context, start))
            if config.run.resume:
                run.resume()
            run.tell(lambda o: o.on_start(run.info()))
            run.warn(*chat_cautions(config.task, context.tokenizer, context.stop))
            begin_trackers(accelerator, config, folder, done=run.step)
            return run.run()
        finally:
            for observer in observers if accelerator.is_main_process else ():
                observer.close()
            end(accelerator, config)


def end(accelerator: Accelerator, config: TrainConfig) -> None:
    """Close the trackers; and the processes' group, unless vLLM is in these processes and ends it when it exits."""
    if config.rollout.sampler != "vllm" or config.rollout.sampler_url is not None:
        accelerator.end_training()
        return
    for tracker in accelerator.trackers:
        tracker.finish()


def check_vllm(config: TrainConfig) -> None:
    """Refuse a run that vLLM is to sample for where it is not installed.

    Raises:
        MissingLibrary: it is missing.
    """
    asked = config.rollout.sampler == "vllm" or config.rollout.sampler_url is not None
    if asked and find_spec("vllm") is None:
        raise MissingLibrary(
            "sampler='vllm' needs vLLM, which is not installed",
            got="no module vllm",
            why="TRL talks to vLLM's server through it, or generates with it in the training processes",
            fix='pip install "trl[vllm]", or in a checkout of klamp make an environment that has it for CPUs: '
            "scripts/environment.sh vllm; or leave sampler and sampler_url out",
        )


def check_devices(config: TrainConfig) -> None:
    """Refuse a single process that sees several GPUs: TRL would run copies of the model in threads, and refuses too.

    Raises:
        ConfigError: it does.
    """
    seen = 0 if on_cpu(config) else torch.accelerator.device_count()
    if seen > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ConfigError(
            "backend='trl' takes one process for each GPU",
            got=f"one process, {seen} GPUs",
            why="a single process that sees several would have to copy the model for each step",
            fix=f"launch it with accelerate launch --multi_gpu --num_processes {seen} -m klamp.cli train ..., or set "
            "CUDA_VISIBLE_DEVICES=0",
        )


def check_split(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse ways to divide the weights among processes that a run cannot have.

    Raises:
        ConfigError: float32 copies of 16-bit weights, or an FSDP that accelerate does not use here.
    """
    split, plugin = is_used(accelerator), accelerator.state.deepspeed_plugin
    copies = config.model.dtype == "bfloat16" and config.model.master_weights == "float32" and not config.model.lora_r
    if copies and (split or plugin is not None):
        raise ConfigError(
            "float32 copies of 16-bit weights cannot be divided among processes by TRL",
            got=f"dtype={config.model.dtype!r}, master_weights='float32'",
            why="FSDP2 and DeepSpeed put their own weights into the optimizer in the place of the copies",
            fix="set dtype='float32' or master_weights='none'",
        )


def save_whole_models(plugin: Any) -> None:
    """Have DeepSpeed's ZeRO-3 put the model together in each checkpoint, which holds its parts alone else.

    Args:
        plugin: accelerate's settings of DeepSpeed, of TRL's arguments; None: it is not used.
    """
    if plugin is not None and plugin.zero_stage == 3:
        plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def context_of(config: TrainConfig, folder: Path, accelerator: Accelerator, start: Start) -> Context:
    """The shared parts of a run whose models TRL holds."""
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=start.model,
        wrapped=start.model,
        reference=None,
        original=None,
        excluded=excluded_ids(config.kl.kl_exclude_tokens, start.tokenizer),
        tokenizer=start.tokenizer,
        task=start.task,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        stop=start.stop,
        vocabulary=output_size(start.model),
    )


def trainer_of(context: Context, start: Start) -> RunTrainer:
    """TRL's trainer for a run.

    Raises:
        ModelError: an adapter that does not fit the model, or a reference with another vocabulary.
        ConfigError: what TRL can only see with the model at hand.
    """
    config = context.config
    model, cpu = config.model, on_cpu(config)
    given = trl_arguments(config, context.output_dir, processes=context.processes, exact=context.exact_completions)
    named = model.ref_model is not None and config.kl.needs_reference
    reference = load_reference(config, start.model) if named else None
    with former_names(), adapter_errors(model):
        warnings.simplefilter("ignore", KLWarning)  # said when the configuration was made
        args = GRPOConfig(**given, use_cpu=cpu, dataloader_pin_memory=not cpu)
        save_whole_models(args.deepspeed_plugin)
        if cpu and config.rollout.sampler == "vllm" and config.rollout.sampler_url is None:
            pack_nothing()
        return RunTrainer(
            config,
            start.stop,
            model=start.model,
            ref_model=reference,
            reward_funcs=reward_function(context),
            args=args,
            train_dataset=dataset_of(start.task),
            processing_class=start.tokenizer,
            peft_config=adapter_config(model) if model.lora_r else None,
        )
