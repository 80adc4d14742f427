"""The configuration of a training run: `TrainConfig`, made of one frozen section per subject.

Field names are unique across the classes, so that a YAML file and the command line can be flat.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_type_hints

from klamp.config import KLConfig, LossConfig, TeacherConfig, build_objective
from klamp.config.beyond import baseline_cautions
from klamp.config.fields import check_cluster, check_server, resolve_aliases, setting
from klamp.config.kl import DType
from klamp.config.teacher import ALL_ALIASES, UNBIASED
from klamp.core.arguments import ABOVE_0_TO_1, AT_LEAST_0, AT_LEAST_1, FROM_0_BELOW_1, POSITIVE, Numbers, check_fields
from klamp.core.controllers import Schedule
from klamp.doctor.alarms import check_names
from klamp.errors import KLWarning, Refusal, refuse
from klamp.files import at_home
from klamp.hosts.common.control import warn_few_prompts
from klamp.lab.tasks.base import NO_REWARD, TaskConfig

Backend: TypeAlias = Literal["local", "trl", "verl"]
Sampler: TypeAlias = Literal["own", "vllm"]
MasterWeights: TypeAlias = Literal["float32", "none"]

MOMENT = FROM_0_BELOW_1.but("it is the share of a moment that a step keeps", "")
RATES = POSITIVE.but("0 trains nothing, and below 0 the loss rises", "1e-6 for large models")
SEEDS = Numbers(" from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, "numpy takes no other seed")
SHARE = ABOVE_0_TO_1.but("it is a share of the probability", "use 1.0 to sample the whole policy")
GREEDY = "a group of greedy completions is one completion, and has no advantage"
LARGE_RATE = 0.02
"""The size of a weight in a new language model (`initializer_range`); AdamW moves each by about the learning rate."""
TEMPERATURES = Numbers(" >= 1e-6", lambda x: x >= 1e-6, GREEDY, "use 1.0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, against which reference, and which of its weights move."""

    model: str = "builtin"
    """`builtin` (a small model for the built-in task, trained once and cached), a local folder, or a hub id."""
    ref_model: str | None = None
    """The reference, named like the model; None: the model itself, as it was before training."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None: the model's."""
    dtype: DType = "float32"
    """Data type of the weights; float16 for the base of a LoRA adapter only."""
    master_weights: MasterWeights = "float32"
    """Train all weights of a bfloat16 model on float32 copies, or (none) in bfloat16 alone, where most never move."""
    lora_r: int = setting(0, AT_LEAST_0)
    """Rank of a LoRA adapter; 0 trains all weights."""
    lora_alpha: int = setting(32, AT_LEAST_1)
    """Scale of the adapter."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled: prompts_per_step * num_generations per step."""

    prompts_per_step: int = setting(32, AT_LEAST_1)
    """Prompts per step."""
    num_generations: int = setting(8, AT_LEAST_1)
    """Completions per prompt: the group; 1 where a teacher takes the place of the reward."""
    max_completion_length: int = setting(16, AT_LEAST_1)
    """Longest completion in tokens."""
    max_prompt_length: int = setting(512, AT_LEAST_1)
    """Longest prompt in tokens that there is room for (backend verl); a longer one is refused before any work."""
    temperature: float = setting(1.0, TEMPERATURES)
    """Sampling temperature; log-probabilities and the KL are those at this temperature."""
    top_p: float = setting(1.0, SHARE)
    """Nucleus sampling; below 1 the support is cut, and k1 and k3 of the uncut models are biased alike."""
    top_k: int = setting(0, AT_LEAST_0)
    """Top-k sampling; 0: off."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that reached max_completion_length without an end token."""
    sampler: Sampler = "own"
    """Who writes the completions: the backend's own generation, or vllm inside the training processes (backend trl)."""
    sampler_url: str | None = None
    """Address of a vLLM server that `trl vllm-serve` runs, which writes them instead (backend trl); None: no server."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_server(self.sampler_url, "sampler_url", key="your ~/.netrc, which TRL's client reads")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    learning_rate: float = setting(1e-4, RATES)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Schedule = "cosine"
    """constant, linear or cosine, after the warm-up."""
    warmup_steps: int = setting(10, AT_LEAST_0)
    """Steps of linear warm-up."""
    weight_decay: float = setting(0.0, AT_LEAST_0)
    """Decoupled weight decay."""
    adam_beta1: float = setting(0.9, MOMENT)
    """Decay of AdamW's first moment."""
    adam_beta2: float = setting(0.99, MOMENT)
    """Decay of AdamW's second moment."""
    max_grad_norm: float = setting(1.0, AT_LEAST_0)
    """Largest norm of the gradient; 0: no clipping."""
    num_iterations: int = setting(1, AT_LEAST_1)
    """Updates per rollout; from the second on, ratios are taken against the log-probabilities before the first."""
    gradient_accumulation_steps: int = setting(1, AT_LEAST_1)
    """Parts of a step, computed one after the other; the result equals the whole step's exactly."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run is, what it writes, and where."""

    output_dir: str | None = None
    """Folder of the run; None: runs/TASK-NNN with the next free number."""
    max_steps: int = setting(120, AT_LEAST_0)
    """Steps, each with one rollout."""
    seed: int = setting(0, SEEDS)
    """Seed of sampling and of the order of prompts."""
    eval_every: int = setting(40, AT_LEAST_0)
    """Steps between evaluations; 0: only before and after."""
    save_every: int = setting(40, AT_LEAST_0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = setting(2, AT_LEAST_1)
    """How many checkpoints to keep."""
    log_completions: int = setting(8, AT_LEAST_0)
    """Completions per logged step that are written to completions.jsonl."""
    log_completions_every: int = setting(10, AT_LEAST_1)
    """Steps between logged completions."""
    log_answers: int = setting(4, AT_LEAST_0)
    """Greedy answers per skill that every evaluation writes to answers.jsonl."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Trackers: tensorboard, wandb (if it is installed); none: no tracker."""
    resume: bool = False
    """Continue a run from its newest checkpoint, as it was but for what is named: `--resume RUN`, or output_dir."""
    exact_kl_completions: int | None = setting(None, AT_LEAST_0)
    """Completions per group whose exact KL is measured, in both directions; None: all of them for a small vocabulary,
    else one and KL(policy||ref) only."""
    cpu: bool = False
    """Stay on the CPU even where there is an accelerator."""
    stop_on: tuple[str, ...] = ()
    """Alarms (and notes) at which to stop, with a checkpoint kept; `klamp doctor --help` lists them."""
    backend: Backend = "local"
    """Who trains: local (klamp's own loop), trl (TRL's GRPO), or verl (its own program, on Ray)."""
    gpus: int = setting(1, AT_LEAST_1)
    """GPUs to use on each machine (backends verl and trl, which gets a process for each)."""
    gpu_memory: float = setting(80.0, POSITIVE)
    """Memory of a GPU in GB, by which parts of a step, offloading and the engine's share are chosen."""
    machines: int = setting(1, AT_LEAST_1)
    """Machines of the Ray cluster to use (backend verl)."""
    ray_address: str | None = None
    """Address of a Ray cluster to run on (backend verl); None: one of this machine alone, started for the run."""
    verl_args: tuple[str, ...] = ()
    """More arguments of verl, KEY=VALUE as in Hydra (backend verl); they come last, and win."""

    def __post_init__(self) -> None:
        check_fields(self)
        if {*self.report_to} == {"none"}:  # as transformers and TRL have it
            object.__setattr__(self, "report_to", ())
        if (self.output_dir or "").startswith("~"):
            object.__setattr__(self, "output_dir", str(at_home(self.output_dir or "")))
        check_names(self.stop_on)
        check_cluster(self.ray_address, "ray_address")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run.

    Raises:
        ConfigError: parts that do not fit together.
    """

    kl: KLConfig = field(default_factory=KLConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        build_objective(self.kl, self.loss, max_length=self.rollout.max_completion_length, teacher=self.teacher)
        refuse(_refusals(self))
        warn_few_prompts(self.kl, self.rollout.prompts_per_step)
        for text in self._cautions():
            warnings.warn(text, KLWarning, stacklevel=3)

    def _cautions(self) -> Iterator[str]:
        cut, teacher = self.rollout.top_p < 1 or self.rollout.top_k > 0, self.teacher
        noise = (self.kl.kl_estimator, self.kl.kl_gradient) == ("k1", "own")
        once = self.optim.num_iterations == 1
        of_sampler = self.kl.beta > 0 if self.kl.reference == "sampler" else self.kl.sampler_coef > 0
        if of_sampler and once and not cut and not noise:
            yield (
                "A KL to the sampler has no effect with num_iterations=1, but for rounding: at a rollout's only update "
                "the policy is the sampler. Use num_iterations of 2 or more, or leave it out."
            )
        for term in (self.kl.build_term(), teacher.build_term()):
            yield from baseline_cautions(term, later=not once, cut=cut)
        sampled = teacher.teacher_estimator in ("k1", "k3") or teacher.teacher_horizon == "sequence"
        sampled |= teacher.teacher_estimator == "topk" and teacher.teacher_tail in UNBIASED
        if cut and sampled and teacher.there and teacher.teacher_placement == "loss":
            effect = "the KL to the teacher is that over what it keeps. For the KL over all words"
            if teacher.teacher_off_policy == "none":
                effect = "without the weight policy / sampler the KL to the teacher is off. Set teacher_off_policy="
                effect += f"{teacher.teacher_horizon!r} for the KL over what it keeps, or"
            top_p, top_k = self.rollout.top_p, self.rollout.top_k
            yield f"top_p={top_p:g} and top_k={top_k} cut the sampler: {effect} sample the whole policy."
        pulls = {"kl": self.kl.beta > 0 and self.kl.kl_estimator != "exact", "teacher": teacher.there and sampled}
        for name, config in {"kl": self.kl, "teacher": teacher}.items() if not once else ():
            where, weights, reach = (getattr(config, f"{name}_{x}") for x in ("placement", "off_policy", "horizon"))
            if pulls[name] and (where, weights) == ("loss", "none"):
                text = f"num_iterations={self.optim.num_iterations}: the second update has tokens of an older policy, "
                yield f"{text}and the KL that they estimate is off. Set {name}_off_policy={reach!r}."
        if self.model.master_weights == "none" and (self.model.dtype == "float32" or self.model.lora_r):
            yield "master_weights='none' has no effect: float32 weights, which all LoRA adapters are, have no copies."
        optim, own = self.optim, once or self.run.backend != "trl"  # each update is a step of TRL's
        if (rate := optim.learning_rate) > LARGE_RATE:
            yield (
                f"learning_rate={rate:g} moves each weight by about {rate:g} in one update, and a model's weights are "
                f"about {LARGE_RATE} in size: a few updates destroy it. Use 1e-6 to 1e-4, for an adapter up to 1e-3."
            )
        factors = {"learning rate": "warmup_steps" * own, "beta": "kl_warmup_steps" * (self.kl.beta > 0)}
        for factor, name in {**factors, "teacher_coef": "teacher_warmup_steps" * teacher.there}.items():
            if self.run.max_steps == 1 and name and (value := self.flat()[name]):
                yield f"{name}={value} with max_steps=1 leaves the only step a {factor} of 0: set it to 0"
        if self.kl.kl_early_stop is not None and once:
            yield (
                f"kl_early_stop={self.kl.kl_early_stop!r} has no effect: it needs num_iterations of 2 or more, since "
                "at a rollout's first update the policy is the one that sampled it."
            )

    def flat(self) -> dict[str, Any]:
        """All fields in one mapping: name -> plain value."""
        sections = (dataclasses.asdict(getattr(self, section.name)) for section in dataclasses.fields(self))
        return {name: value for section in sections for name, value in section.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from flat values: aliases are resolved, a missing field has its default; beta 0 if no reward.

        Raises:
            UnknownNameError: a key that is no field; names the nearest.
            ConfigError: values that do not fit.
        """
        owners = field_owners()
        sections: dict[str, dict[str, Any]] = {section.name: {} for section in dataclasses.fields(cls)}
        alone = {"beta": 0.0} if values.get("reward") == NO_REWARD else {}
        for name, value in {**alone, **resolve_aliases(values, set(owners), ALL_ALIASES)}.items():
            sections[owners[name]][name] = tuple(value) if isinstance(value, list) else value
        classes = section_classes()
        return cls(**{name: classes[name](**fields) for name, fields in sections.items()})


def section_classes() -> dict[str, type]:
    """Name of each section -> its configuration class."""
    return get_type_hints(TrainConfig)


def field_owners() -> dict[str, str]:
    """Name of each field -> its section; no two sections share a name."""
    return {f.name: name for name, cls in section_classes().items() for f in dataclasses.fields(cls)}


WATCHING = (
    *("stop_on", "save_every", "keep_checkpoints", "eval_every"),
    *("log_completions", "log_completions_every", "log_answers", "report_to"),
)
"""Fields that change what a run saves, evaluates and logs, and not what it learns."""
USER = re.compile(r"[A-Za-z][\w+.-]*://[^/?#\s]*@")
"""The beginning of a URL that names a user."""


def _refusals(c: TrainConfig) -> Iterator[Refusal]:
    """What cannot work of several sections together, and texts that klamp may not write down as they stand."""
    for name, value in c.flat().items():
        texts = value if isinstance(value, tuple) else (value,)
        yield Refusal(
            any(isinstance(text, str) and USER.search(text) for text in texts),
            f"{name} holds a URL with a user or a password",
            got=" ".join(map(str, texts)),
            why="it would be shown, and written into the run's folder",
            fix="leave them out; what reads the URL takes them from its own environment variables or files",
        )
    kl, teacher, size = c.kl, c.teacher, c.rollout.num_generations
    silent = c.task.reward == NO_REWARD
    yield from [
        Refusal(
            c.run.resume and c.run.output_dir is None,
            "resume needs output_dir",
            got="output_dir=None",
            why="a run is continued from the checkpoints in its folder",
            fix="pass the folder of the run: --output_dir runs/NAME --resume",
        ),
        Refusal(
            c.model.dtype == "float16" and not c.model.lora_r,
            "dtype='float16' cannot train all weights",
            got="dtype='float16', lora_r=0",
            why="its range is too small for gradients and moments, and klamp scales no loss: four steps ruin a model",
            fix="use dtype='bfloat16', which takes the same memory, or lora_r=16: an adapter is float32 in any case",
        ),
        Refusal(
            silent and not teacher.there,
            f"reward={NO_REWARD!r} needs a teacher",
            got=f"teacher_model=None, teacher_coef={teacher.teacher_coef:g}",
            why="without a reward and without a teacher there is nothing to learn from",
            fix="set teacher_model to whom the policy is to become like, or name a reward",
        ),
        Refusal(
            size == 1 and not silent,
            "num_generations=1 leaves a reward nothing to be compared with",
            got=f"num_generations=1, reward={c.task.reward!r}",
            why="an advantage is a reward less the other rewards of its group; a teacher's KL alone needs no group",
            fix=f"use num_generations of 2 or more, or reward={NO_REWARD!r} with a teacher",
        ),
        Refusal(
            teacher.kind == "adapter_off" and not c.model.lora_r,
            "teacher_kind='adapter_off' needs an adapter",
            got="lora_r=0",
            why="the teacher is the policy with its LoRA adapter switched off",
            fix="set lora_r (16 is usual), or teacher_model",
        ),
        Refusal(
            c.rollout.temperature != 1 and "remote" in (teacher.kind, reference_kind(c)),
            "a vLLM server scores at temperature 1 only",
            got=f"temperature={c.rollout.temperature:g}",
            why="it returns log-probabilities of prompts before any temperature",
            fix="set temperature=1, or keep the model on this machine (reference='frozen', teacher_model)",
        ),
        Refusal(
            teacher.kind == "live" and not teacher.teacher_prompt,
            "teacher_kind='live' needs teacher_prompt",
            why="the policy is its own teacher: at one prompt their KL is always 0",
            fix="name the column of the prompt that the teacher sees",
        ),
    ]
    kl_in_reward = kl.needs_reference and kl.kl_placement == "reward"
    teacher_in_reward = teacher.there and teacher.teacher_placement == "reward"
    alone = "the KL would be the whole reward, and comparing it within groups takes most of it away"
    for applies, what, why, fix in (
        (kl_in_reward, "kl_placement='reward'", alone, "set kl_placement='loss'"),
        (teacher_in_reward, "teacher_placement='reward'", alone, "set teacher_placement='advantage' (or 'loss')"),
        (kl.controller_name != "fixed", "a KL target", "the rule prices a nat in reward", "use a fixed beta"),
    ):
        yield Refusal(silent and applies, f"{what} needs a reward", got=f"reward={NO_REWARD!r}", why=why, fix=fix)


def reference_kind(config: TrainConfig) -> str:
    """The kind of a run's reference: none, sampler, frozen, adapter_off, ema, periodic or remote."""
    if not config.kl.needs_reference:
        return "none"
    if config.kl.reference != "auto":
        return config.kl.reference
    return "adapter_off" if config.model.lora_r and config.model.ref_model is None else "frozen"
