"""What `klamp train --backend trl` runs: `klamp.trl.GRPOTrainer` with klamp's models, prompts, rewards, advantages."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState

from klamp.core.advantages import group_advantages
from klamp.errors import KLWarning
from klamp.hosts.common.rollout import LENGTH_COLUMN
from klamp.hosts.common.sampler_weights import pack_nothing
from klamp.hosts.trl.callbacks import DoctorCallback, ReportCallback
from klamp.hosts.trl.grpo_config import GRPOConfig
from klamp.hosts.trl.grpo_trainer import GRPOTrainer
from klamp.lab import models
from klamp.lab.anchors import check_tokens_of, teacher_prompts
from klamp.lab.checkpoint import check, seal
from klamp.lab.config import TrainConfig
from klamp.lab.engines.trl_arguments import TEACHER_PROMPT, trl_arguments, weights_dtype
from klamp.lab.folders import newest_complete
from klamp.lab.interrupts import Interrupt, deferred_interrupts
from klamp.lab.observers import stopped_by
from klamp.lab.sampling import examples_of_run
from klamp.lab.setup import load_prompts
from klamp.lab.tasks.base import NO_REWARD, Example
from klamp.names import IDENTITY

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE = "klamp_example"  # the column that holds all of a prompt, for the reward


def train(config: TrainConfig, folder: Path, *, begin: Callable[[], None]) -> None:
    """Train to the last step; with `resume` from TRL's newest whole checkpoint. `begin`: called once all is loaded."""
    run, ending = config.run, RunCallback()
    doctor = DoctorCallback(run.stop_on, other_reference=config.model.ref_model is not None)
    report = ReportCallback(every=run.log_completions_every, completions=run.log_completions, answers=run.log_answers)
    with models.former_names():
        trainer = trainer_of(config, folder, [report, doctor, ending])
        begin()
        newest = newest_complete(folder) if run.resume else None
        if newest is not None:
            check(newest)
        with deferred_interrupts() as ending.interrupt:
            trainer.train(resume_from_checkpoint=newest and str(newest))
    if doctor.stopped_by is not None:
        raise stopped_by(doctor.stopped_by, f"update {trainer.state.global_step} of {trainer.state.max_steps}")


def trainer_of(config: TrainConfig, folder: Path, callbacks: list[TrainerCallback]) -> GRPOTrainer:
    """The trainer of a run by TRL, with klamp's models, prompts and rewards."""
    model, rollout = config.model, config.rollout
    cpu = config.run.cpu or not torch.accelerator.is_available()
    with warnings.catch_warnings(action="ignore", category=KLWarning):  # said when the configuration was made
        args = GRPOConfig(**trl_arguments(config, folder), dataloader_pin_memory=not cpu)
    with args.main_process_first():  # one process downloads, or teaches the built-in model
        models.make_ready(model.model)
    policy = models.load_model(model.model, weights_dtype(model))
    tokenizer = models.load_tokenizer(model.tokenizer or model.model)
    task = load_prompts(config, tokenizer, longest=models.max_length(policy.config))
    reference = model.ref_model if config.kl.needs_reference else None
    if reference is not None:
        check_tokens_of(reference, tokenizer, who="reference")
    shown = teacher_prompts(config, task, tokenizer)
    if cpu and rollout.sampler == "vllm" and rollout.sampler_url is None:
        pack_nothing()

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        rows = zip(columns[EXAMPLE], completions, strict=True)
        return [task.score(Example(**json.loads(row)), text) for row, text in rows]

    with models.adapter_errors(model):
        return RunTrainer(
            config,
            model=policy,
            ref_model=None if reference is None else models.model_path(reference),
            reward_funcs=reward,
            args=args,
            train_dataset=rows_of([task.train[i] for i in examples_of_run(config, len(task.train))], shown),
            eval_dataset=rows_of(task.evaluation[task.rl_skill], shown),
            processing_class=tokenizer,
            peft_config=models.adapter_config(model) if model.lora_r else None,
            callbacks=callbacks,
        )


def rows_of(examples: Sequence[Example], shown: dict[str, str]) -> Dataset:
    """Prompts as rows of TRL's; `shown`: prompt -> the teacher's prompt."""
    from datasets import Dataset  # it comes with TRL

    prompts = [example.prompt for example in examples]
    columns: dict[str, list[Any]] = {
        "prompt": prompts,
        EXAMPLE: [json.dumps(dataclasses.asdict(example), default=str) for example in examples],
        LENGTH_COLUMN: [example.reference_length for example in examples],
    }
    return Dataset.from_dict(columns | ({TEACHER_PROMPT: [shown.get(p, p) for p in prompts]} if shown else {}))


class OwnAdvantages(trl.GRPOTrainer):
    """TRL's trainer with the advantages of klamp's `group_advantages`, and unchanged prompts; klamp's KL comes after.

    TRL has one baseline, the group's mean, and writes special tokens in front of prompts that have theirs.
    """

    config: TrainConfig

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        rewards, loss, size = self._klamp.rollout.rewards, self.config.loss, len(output["advantages"])  # pyright: ignore
        training = self.model is not None and self.model.training
        if rewards is None or not training or self.config.task.reward == NO_REWARD:
            return output
        group = self.config.rollout.num_generations
        every = group_advantages(rewards.flatten(), group, scale=loss.scale, baseline=loss.advantage_baseline)
        first = self.accelerator.process_index * size
        output["advantages"] = every[first : first + size].to(output["advantages"])
        return output

    def _tokenize_prompts(self, prompts: Any) -> Any:
        _, *others = super()._tokenize_prompts(prompts)
        return self._tokenizer(list(prompts), add_special_tokens=False)["input_ids"], *others


class RunTrainer(GRPOTrainer, OwnAdvantages):
    """The trainer of a run, with the options of `klamp.trl.GRPOTrainer`."""

    def __init__(self, config: TrainConfig, **options: Any) -> None:
        self.config, self._baseline = config, config.loss.advantage_baseline
        super().__init__(**options)


class RunCallback(TrainerCallback):
    """Ends a run after the step in which a signal came; evaluates after the last step; completes each checkpoint."""

    interrupt: Interrupt

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_evaluate |= state.global_step >= state.max_steps
        if self.interrupt.asked:
            raise KeyboardInterrupt

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the run's identity and the SHA-256 of all files, once every process has written its part."""
        PartialState().wait_for_everyone()
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            shutil.copyfile(folder.parent / IDENTITY, folder / IDENTITY)
            seal(folder)
