"""`klamp train --backend trl`: a configuration of klamp, run by TRL's GRPO with klamp's KL in it.

Models, task, prompts and their order, rewards, advantages, optimizer, schedule, evaluation, metrics and the run's
folder are those of klamp's own loop. Generation, the loss with klamp's KL in it, the backward pass, processes and
checkpoints are TRL's. What klamp's own loop does after each step is done when TRL has logged one.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from klamp.hosts.common.versions import caution_beside, check_version

check_version("trl")

import torch  # noqa: E402  (the version is checked before TRL is opened up)
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from transformers import TrainerCallback, TrainerControl, TrainerState  # noqa: E402
from trl.models import unwrap_model_for_generation  # noqa: E402

from klamp.diagnostics.names import translate  # noqa: E402
from klamp.errors import ConfigError, KLWarning, missing_library  # noqa: E402
from klamp.hosts.common.sampler_weights import pack_nothing  # noqa: E402
from klamp.hosts.trl.exact import weights_are_split  # noqa: E402
from klamp.hosts.trl.grpo_config import GRPOConfig  # noqa: E402
from klamp.scoring.scorer import Scorer  # noqa: E402
from klamp.training import checkpoint  # noqa: E402
from klamp.training.config import TrainConfig  # noqa: E402
from klamp.training.context import Context  # noqa: E402
from klamp.training.evaluation import Evaluation, evaluate  # noqa: E402
from klamp.training.folders import number_of  # noqa: E402
from klamp.training.in_trl.arguments import part_size, trl_arguments  # noqa: E402
from klamp.training.in_trl.trainer import (  # noqa: E402
    RunTrainer,
    dataset_of,
    reward_function,
    rollout_of,
    update_of,
)
from klamp.training.models import adapter_config, adapter_errors, former_names  # noqa: E402
from klamp.training.observers import Observer, RunInfo  # noqa: E402
from klamp.training.processes import DEEPSPEED, FSDP, asked_for  # noqa: E402
from klamp.training.run import Interrupt, Training  # noqa: E402
from klamp.training.setup import load_context, load_reference, on_cpu  # noqa: E402
from klamp.training.teachers import load_teachers  # noqa: E402
from klamp.training.updates import UpdateOutput, control_metrics, measured, not_finite, speed  # noqa: E402


class TRLRun(Training):
    """A run whose steps are TRL's, in one process, or in those that torchrun or `accelerate launch` starts.

    Args:
        context: of the run; its policy and control become those of the trainer.
        observers: told what happens.
        trainer: built and not yet started.
    """

    def __init__(self, context: Context, observers: Sequence[Observer], trainer: RunTrainer) -> None:
        context.policy = trainer.accelerator.unwrap_model(trainer.model)
        context.control = trainer._klamp.control or context.control
        if weights_are_split(trainer):
            context.teachers = None  # it scores in TRL, and writes no answers of its own
        super().__init__(context, observers)
        self.trainer, self.updates = trainer, context.config.optim.num_iterations
        self.outputs: list[UpdateOutput] = []
        self.first: dict[str, float] = {}
        self.interrupt, self.flow = Interrupt(), TrainerControl()
        self.ended: BaseException | None = None
        self.started = time.perf_counter()
        self.checkpoint: Path | None = None
        trainer.add_callback(AfterStep(self))

    @staticmethod
    def refuse(config: TrainConfig) -> None:
        """Refuse what TRL cannot run here: no vLLM where it is to sample, FSDP1, one process that sees several GPUs."""
        check_vllm(config)
        check_fsdp_version()
        check_devices(config)

    @classmethod
    def build(
        cls, config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer], last: ExitStack
    ) -> Self:
        """Read the newest checkpoint once to its last byte; load model and task, and make TRL's trainer."""
        part_size(config, accelerator.num_processes)
        check_split(config, accelerator)
        if config.run.resume:
            checkpoint.whole_newest(folder, begin=checkpoint.OF_TRL)
        context = load_context(config, accelerator, folder, observers)
        return cls(context, observers, trainer_of(context))

    def resume(self) -> None:
        """Continue from TRL's newest checkpoint in the run's folder; from the first step where there is none yet."""
        self.checkpoint = checkpoint.newest(self.context.output_dir, begin=checkpoint.OF_TRL)
        if self.checkpoint is not None:
            self.step = number_of(self.checkpoint) // self.updates
            self.recall()

    def take_steps(self, interrupt: Interrupt) -> None:
        """Let TRL take all steps that are left; what ends the run early is raised here, once TRL is done."""
        self.interrupt = interrupt
        if self.step < self.context.config.run.max_steps:
            with former_names():
                self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        if self.ended is not None:
            raise self.ended

    def save(self) -> Path | None:
        """Have TRL write a checkpoint once it is done with this step."""
        self.flow.should_save = True

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from, and its checkpoint."""
        found = checkpoint.checkpoints(self.context.output_dir, begin=checkpoint.OF_TRL)
        return (number_of(found[-1]) // self.updates, found[-1]) if found else (0, None)

    @staticmethod
    def close(accelerator: Accelerator, config: TrainConfig) -> None:
        """Close the trackers; and the processes' group, unless vLLM is in these processes and ends it when it exits."""
        if config.rollout.sampler != "vllm" or config.rollout.sampler_url is not None:
            accelerator.end_training()
            return
        for tracker in accelerator.trackers:
            tracker.finish()

    def after_update(self, logs: Mapping[str, Any], flow: TrainerControl) -> None:
        """Take in an update that TRL has logged; after the last of a step, do what a step ends with."""
        generated = self.trainer.generated
        assert generated is not None
        self.flow, found = flow, translate(logs)
        rollout = rollout_of(self.context, generated)
        if not self.outputs:
            self.first = found
        beta = self.first.get("beta", 0.0)
        seen = generated.seen(len(self.outputs))
        loss, grad_norm = found["train/loss"], found.get("train/grad_norm", 0.0)
        if not math.isfinite(grad_norm):  # the weights are gone; no checkpoint is to hold them
            raise not_finite("the gradient is not finite", f"loss {loss}, gradient norm {grad_norm}")
        both = (beta, self.first.get("teacher/coef", 0.0))
        self.outputs.append(update_of(self.context, rollout, seen, coefficients=both, loss=loss, grad_norm=grad_norm))
        if len(self.outputs) < self.updates:
            return
        self.warn(*self.trainer.cautions)
        self.trainer.cautions.clear()
        metrics = self.first | measured(self.context, rollout, self.outputs)
        metrics["train/learning_rate"] = self.first["train/learning_rate"]
        metrics |= control_metrics(self.context, beta, metrics)
        if "kl/k3" in metrics:
            self._check_step_zero(metrics["kl/k3"])
        metrics |= speed(float(rollout.totals.tokens), time.perf_counter() - self.started)
        self._show_completions(rollout, self.outputs[0])
        self.outputs = []
        self.step += 1
        self.ended = self.end_step(metrics, self.interrupt)
        if self.ended is not None:  # a callback of TRL's cannot raise it: TRL is asked to save and to stop
            flow.should_save = flow.should_training_stop = True

    def examine(self) -> Evaluation:
        """Every skill's score now, and some answers."""
        accelerator, plugin = self.trainer.accelerator, getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        wrapped: Any = self.trainer.model_wrapped
        self.context.policy = policy = accelerator.unwrap_model(wrapped)
        with (
            gathered(policy, split_after_passes=plugin is not None and bool(plugin.reshard_after_forward)),
            unwrap_model_for_generation(wrapped, accelerator),  # under ZeRO-3 every process gets all weights
        ):
            return evaluate(self.context)

    def reference_model(self) -> nn.Module | None:
        """TRL's reference model; None with an adapter, or without a KL."""
        model: Any = self.trainer.ref_model
        return None if model is None else self.trainer.accelerator.unwrap_model(model)

    def info(self) -> RunInfo:
        """What is known of the run before its first step."""
        return replace(super().info(), reference=self.trainer._klamp.reference or "none")


class AfterStep(TrainerCallback):
    """Hands what TRL logs and saves to a run."""

    def __init__(self, run: TRLRun) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock of a step; TRL generates within the first of its updates."""
        if not self.run.outputs:
            self.run.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Take in an update; the last row of a run, which sums it up, is none."""
        if logs and "train_runtime" not in logs:
            self.run.after_update(logs, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell of the checkpoint."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        self.run.tell(lambda o: o.on_checkpoint(self.run.step, folder))


def trainer_of(context: Context) -> RunTrainer:
    """TRL's trainer for a run.

    Raises:
        ModelError: an adapter that does not fit the model, or a reference with another vocabulary.
        ConfigError: what TRL can only see with the model at hand.
    """
    config = context.config
    model, cpu = config.model, on_cpu(config)
    given = trl_arguments(config, context.output_dir, processes=context.processes, exact=context.exact_completions)
    named = model.ref_model is not None and config.kl.needs_reference
    reference = load_reference(config, context) if named else None
    if config.teacher.kind in ("frozen", "remote"):  # the others are the policy, which TRL has yet to wrap
        scorer = Scorer(context.policy)
        context.teachers = load_teachers(config, scorer, context.task, context.tokenizer, context.accelerator)
    taught = None if context.teachers is None else context.teachers.models[""]
    with former_names(), adapter_errors(model):
        warnings.simplefilter("ignore", KLWarning)  # said when the configuration was made
        given["bf16"] = asked_for(DEEPSPEED) and os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
        args = GRPOConfig(**given, use_cpu=cpu, dataloader_pin_memory=not cpu)
        if (plugin := args.deepspeed_plugin) is not None and plugin.zero_stage == 3:  # it keeps its parts alone else
            plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if cpu and config.rollout.sampler == "vllm" and config.rollout.sampler_url is None:
            pack_nothing()
        return RunTrainer(
            config,
            context.stop,
            model=context.policy,
            ref_model=reference,
            teacher_model=getattr(taught, "model", None),
            reward_funcs=reward_function(context),
            args=args,
            train_dataset=dataset_of(config, context.task, context.tokenizer),
            processing_class=context.tokenizer,
            peft_config=adapter_config(model) if model.lora_r else None,
        )


def check_vllm(config: TrainConfig) -> None:
    """Refuse a run that vLLM is to sample for where it is not installed.

    Raises:
        MissingLibrary: it is missing.
    """
    asked = config.rollout.sampler == "vllm" or config.rollout.sampler_url is not None
    if asked and find_spec("vllm") is None:
        instead = "in a checkout of klamp scripts/environment.sh vllm for CPUs; or leave sampler and sampler_url out"
        raise missing_library('"trl[vllm]"', by="sampler='vllm'", instead=instead)
    if asked:
        caution_beside("vllm")


def check_devices(config: TrainConfig) -> None:
    """Refuse a single process that sees several GPUs: TRL would run copies of the model in threads, and refuses too.

    Raises:
        ConfigError: it does.
    """
    seen = max(config.run.gpus, 0 if on_cpu(config) else torch.accelerator.device_count())
    if seen > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ConfigError(
            "backend='trl' takes one process for each GPU",
            got=f"one process, {seen} GPUs",
            why="a single process that sees several would have to copy the model for each step",
            fix=f"--prepare --gpus {seen} prints how to launch it; or leave gpus out, and set CUDA_VISIBLE_DEVICES=0",
        )


def check_fsdp_version() -> None:
    """Refuse FSDP1, before accelerate sets it up.

    Raises:
        ConfigError: it was asked for.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if asked_for(FSDP) and version != "2":
        raise ConfigError(
            "klamp train does not run under FSDP1",
            got=f"fsdp_version {version}, which is 1 where none is given",
            why="it flattens the weights, which an evaluation gathers by name",
            fix="launch with --fsdp_version 2; or train with TRL and klamp.trl",
        )


def check_split(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse ways to divide the weights among processes that a run cannot have.

    Raises:
        ConfigError: an FSDP that accelerate does not use here, or float32 copies of 16-bit weights.
    """
    split = asked_for(FSDP) and accelerator.distributed_type is DistributedType.FSDP
    if asked_for(FSDP) and not split and accelerator.num_processes > 1:  # the weights of one are whole either way
        raise ConfigError(
            "FSDP was asked for, and accelerate does not use it here",
            got=f"{accelerator.num_processes} processes on {accelerator.device.type}",
            why="accelerate shards on GPUs and their like only; on CPUs every process would hold all weights",
            fix="launch without FSDP: torchrun, or accelerate launch --multi_gpu (which also joins CPU processes)",
        )
    copies = config.model.dtype == "bfloat16" and config.model.master_weights == "float32" and not config.model.lora_r
    if copies and (split or accelerator.state.deepspeed_plugin is not None):
        raise ConfigError(
            "float32 copies of 16-bit weights cannot be divided among processes by TRL",
            got=f"dtype={config.model.dtype!r}, master_weights='float32'",
            why="FSDP2 and DeepSpeed put their own weights into the optimizer in the place of the copies",
            fix="set dtype='float32' or master_weights='none'",
        )


@contextmanager
def gathered(module: nn.Module, *, split_after_passes: bool) -> Iterator[None]:
    """A context in which every process holds all weights, to read only; all processes must enter it.

    Args:
        module: sharded as one unit or layer by layer, or not at all.
        split_after_passes: whether a unit gives up the weights of others after each pass while it trains.
    """
    # The outermost is first: it prepares all.
    units = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(split_after_passes, recurse=False)
            unit.reshard()
