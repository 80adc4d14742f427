"""The sections of a run's configuration that belong to the trainer: one frozen class each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.config.choices import DType, check_choices
from klamp.core.advantages import GROUP_SIZES
from klamp.core.arguments import check_number
from klamp.core.schedules import Schedule
from klamp.diagnostics.alarms import check_names
from klamp.errors import ConfigError

Backend: TypeAlias = Literal["local", "tinker"]


def _at_least(config: object, least: Mapping[str, float]) -> None:
    for name, bound in least.items():
        value = getattr(config, name)
        if not value >= bound:
            raise ConfigError(f"{name} must be at least {bound:g}", got=value, fix=f"set {name} to {bound:g} or more")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, against which reference, and which of its weights move."""

    model: str = "builtin"
    """`builtin` (a small model for the built-in task, trained once and cached), a local folder, or a hub id."""
    ref_model: str | None = None
    """The reference; None: the model itself, as it was before training."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None: the model's."""
    dtype: DType = "float32"
    """Data type of the weights."""
    lora_r: int = 0
    """Rank of a LoRA adapter; 0 trains all weights."""
    lora_alpha: int = 32
    """Scale of the adapter."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def __post_init__(self) -> None:
        _at_least(self, {"lora_r": 0, "lora_alpha": 1})
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled. A step samples prompts_per_step * num_generations of them, over all processes."""

    prompts_per_step: int = 32
    """Prompts per step."""
    num_generations: int = 8
    """Completions per prompt: the group."""
    max_completion_length: int = 16
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities and the KL are those at this temperature."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the support is cut and k3 is low by the lost reference mass."""
    top_k: int = 0
    """Top-k sampling; 0: off."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that reached max_completion_length without an end token."""

    def __post_init__(self) -> None:
        check_number("num_generations", self.num_generations, GROUP_SIZES, whole=True)
        _at_least(self, {"prompts_per_step": 1, "max_completion_length": 1, "top_k": 0})
        if not self.temperature > 0:
            raise ConfigError(
                "temperature must be positive",
                got=self.temperature,
                why="a group of greedy completions is one completion, and has no advantage",
                fix="use 1.0",
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p must lie in (0, 1]", got=self.top_p, fix="use 1.0 to sample the whole policy")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Schedule = "cosine"
    """constant, linear or cosine, after the warm-up."""
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.99
    """Decay of AdamW's second moment."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""
    num_iterations: int = 1
    """Updates per rollout; from the second on, ratios are taken against the log-probabilities before the first."""
    gradient_accumulation_steps: int = 1
    """Parts that a process's share of a step is computed in; the result is that of the whole, exactly."""

    def __post_init__(self) -> None:
        _at_least(self, {"warmup_steps": 0, "weight_decay": 0, "max_grad_norm": 0})
        _at_least(self, {"num_iterations": 1, "gradient_accumulation_steps": 1})
        if not self.learning_rate > 0:
            raise ConfigError("learning_rate must be positive", got=self.learning_rate, fix="1e-6 for large models")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must lie in [0, 1)",
                    got=getattr(self, name),
                    why="it is the share of a moment that a step keeps",
                    fix=f"use {type(self).__dataclass_fields__[name].default}, the default",
                )
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run is, what it writes, and where."""

    output_dir: str | None = None
    """Folder of the run; None: runs/TASK-NNN with the next free number."""
    max_steps: int = 120
    """Steps, each with one rollout."""
    seed: int = 0
    """Seed of sampling and of the order of prompts."""
    eval_every: int = 40
    """Steps between evaluations; 0: only before and after."""
    save_every: int = 40
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep."""
    log_completions: int = 8
    """Completions per logged step that are written to completions.jsonl."""
    log_completions_every: int = 10
    """Steps between logged completions."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Trackers, through accelerate: tensorboard, wandb, and the others that it knows."""
    resume: bool = False
    """Continue the run in output_dir from its newest checkpoint."""
    exact_kl_completions: int | None = None
    """Completions per group whose exact KL is measured, in both directions; None: all of them for a small vocabulary,
    else one and KL(policy||ref) only."""
    cpu: bool = False
    """Stay on the CPU even where there is an accelerator."""
    stop_on: tuple[str, ...] = ()
    """Alarms (and notes) at which to stop, with a checkpoint kept; `klamp doctor --help` lists them."""
    backend: Backend = "local"
    """Where the weights are: local (this machine), or tinker (a service that the Tinker SDK reaches)."""
    service_timeout: float = 600.0
    """Longest wait for one answer of the service, in seconds."""

    def __post_init__(self) -> None:
        _at_least(self, {"max_steps": 0, "eval_every": 0, "save_every": 0, "keep_checkpoints": 1})
        _at_least(self, {"log_completions": 0, "log_completions_every": 1})
        check_names(self.stop_on)
        check_choices(self)
        if not self.service_timeout > 0:
            raise ConfigError("service_timeout must be positive", got=self.service_timeout, fix="600 is the default")
