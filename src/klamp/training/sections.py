"""The sections of a run's configuration that belong to the trainer: one frozen class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.config.choices import DType
from klamp.config.rules import check_cluster, check_server
from klamp.core.advantages import GROUP_SIZES
from klamp.core.arguments import (
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_BELOW_1,
    POSITIVE,
    SECONDS,
    Numbers,
    check_fields,
)
from klamp.core.schedules import Schedule
from klamp.diagnostics.alarms import check_names

Backend: TypeAlias = Literal["local", "trl", "verl", "tinker"]
Sampler: TypeAlias = Literal["own", "vllm"]
MasterWeights: TypeAlias = Literal["float32", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, against which reference, and which of its weights move."""

    model: str = "builtin"
    """`builtin` (a small model for the built-in task, trained once and cached), `smollm2` (a real language model out of
    a package; see `klamp model`), a local folder, or a hub id."""
    ref_model: str | None = None
    """The reference, named like the model; None: the model itself, as it was before training."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None: the model's."""
    dtype: DType = "float32"
    """Data type of the weights; float16 for the base of a LoRA adapter only."""
    master_weights: MasterWeights = "float32"
    """Train all weights of a bfloat16 model on float32 copies, or (none) in bfloat16 alone, where most never move."""
    lora_r: int = 0
    """Rank of a LoRA adapter; 0 trains all weights."""
    lora_alpha: int = 32
    """Scale of the adapter."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def __post_init__(self) -> None:
        check_fields(self, {"lora_r": AT_LEAST_0, "lora_alpha": AT_LEAST_1})


TEMPERATURES = Numbers(" >= 1e-6", lambda x: x >= 1e-6)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled. A step samples prompts_per_step * num_generations of them, over all processes."""

    prompts_per_step: int = 32
    """Prompts per step."""
    num_generations: int = 8
    """Completions per prompt: the group."""
    max_completion_length: int = 16
    """Longest completion in tokens."""
    max_prompt_length: int = 512
    """Longest prompt in tokens that there is room for (backend verl); a longer one is refused before any work."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities and the KL are those at this temperature."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the support is cut, and k1 and k3 of the uncut models are biased alike."""
    top_k: int = 0
    """Top-k sampling; 0: off."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that reached max_completion_length without an end token."""
    sampler: Sampler = "own"
    """Who writes the completions: the backend's own generation, or vllm inside the training processes (backend trl)."""
    sampler_url: str | None = None
    """Address of a vLLM server that `trl vllm-serve` runs, which writes them instead (backend trl); None: no server."""

    def __post_init__(self) -> None:
        greedy = "a group of greedy completions is one completion, and has no advantage"
        check_fields(
            self,
            {
                "prompts_per_step": AT_LEAST_1,
                "num_generations": GROUP_SIZES,
                "max_completion_length": AT_LEAST_1,
                "max_prompt_length": AT_LEAST_1,
                "temperature": TEMPERATURES.but(greedy, "use 1.0"),
                "top_p": ABOVE_0_TO_1.but("it is a share of the probability", "use 1.0 to sample the whole policy"),
                "top_k": AT_LEAST_0,
            },
        )
        check_server(self.sampler_url, "sampler_url", key="your ~/.netrc, which TRL's client reads")


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
        moment = FROM_0_BELOW_1.but("it is the share of a moment that a step keeps", "")
        check_fields(
            self,
            {
                "learning_rate": POSITIVE.but("0 trains nothing, and below 0 the loss rises", "1e-6 for large models"),
                "warmup_steps": AT_LEAST_0,
                "weight_decay": AT_LEAST_0,
                "adam_beta1": moment,
                "adam_beta2": moment,
                "max_grad_norm": AT_LEAST_0,
                "num_iterations": AT_LEAST_1,
                "gradient_accumulation_steps": AT_LEAST_1,
            },
        )


SEEDS = Numbers(" from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, "numpy takes no other seed")


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
    log_answers: int = 4
    """Greedy answers per skill that every evaluation writes to answers.jsonl."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Trackers, through accelerate: tensorboard, wandb, and the others that it knows; none: no tracker."""
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
    """Who trains: local (klamp's own loop), trl (TRL's GRPO, in this process), verl (its own program, on Ray), or
    tinker (a service that the Tinker SDK reaches)."""
    process_timeout: float = 600.0
    """Longest time in seconds that one process may wait for another (several processes); then the run ends."""
    service_timeout: float = 600.0
    """Longest wait for one answer of the service, in seconds."""
    gpus: int = 1
    """GPUs to use on each machine (backend verl)."""
    machines: int = 1
    """Machines of the Ray cluster to use (backend verl)."""
    ray_address: str | None = None
    """Address of a Ray cluster to run on (backend verl); None: one of this machine alone, started for the run."""
    stall_timeout: float = 3600.0
    """Longest time in seconds that the trainer may take to log a step (backend verl); then it is ended."""
    verl_args: tuple[str, ...] = ()
    """More arguments of verl, KEY=VALUE as in Hydra (backend verl); they come last, and win."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            {
                **dict.fromkeys(
                    ("max_steps", "eval_every", "save_every", "log_completions", "log_answers"), AT_LEAST_0
                ),
                **dict.fromkeys(("keep_checkpoints", "log_completions_every", "gpus", "machines"), AT_LEAST_1),
                "seed": SEEDS,
                "exact_kl_completions": AT_LEAST_0,
                "process_timeout": SECONDS,
                "service_timeout": SECONDS,
                "stall_timeout": SECONDS,
            },
        )
        if self.report_to == ("none",):  # as transformers and TRL have it
            object.__setattr__(self, "report_to", ())
        check_names(self.stop_on)
        check_cluster(self.ray_address, "ray_address")
