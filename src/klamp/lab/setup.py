"""Prepares a run up to its first step: everything is loaded and checked, every refusal happens here.

`Context` is what all parts of a run share; `build` loads it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed

from klamp.config import build_objective
from klamp.config.kl import SMALL_VOCABULARY
from klamp.core.objective import Objective
from klamp.core.types import Direction
from klamp.errors import ConfigError, ModelError
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.rollout import excluded_ids
from klamp.hosts.common.versions import caution_beside
from klamp.lab import checkpoint
from klamp.lab.anchors import (
    FrozenReference,
    Reference,
    Teachers,
    connect,
    load_reference,
    load_teachers,
    of_policy,
    placed,
)
from klamp.lab.config import TrainConfig, reference_kind
from klamp.lab.folders import POLICY
from klamp.lab.models import (
    BUILTIN,
    device_of,
    end_tokens,
    former_names,
    length_of,
    load_model,
    load_tokenizer,
    make_ready,
    max_length,
    ready_tokenizer,
    with_adapter,
)
from klamp.lab.observers import Observer, progress_of
from klamp.lab.sizing import started_processes
from klamp.lab.tasks import check_prompts, load_task
from klamp.lab.tasks.arithmetic import MAX_MODEL_LENGTH, arithmetic_tokenizer
from klamp.lab.tasks.base import Example, Task
from klamp.scoring.model_parts import output_size, rows_of
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer


@dataclass(kw_only=True)
class Context:
    """The shared parts of a run."""

    config: TrainConfig  # the configuration in force
    output_dir: Path  # the folder of the run
    scorer: Scorer  # the policy's scorer
    tokenizer: PreTrainedTokenizerBase  # the tokenizer of the policy
    task: Task  # the prompts and the reward
    reference: Reference | None = None  # the reference model; None where nothing here needs it
    original: Reference | None = None
    """The model that a moving reference started from; None where the reference does not move."""
    teachers: Teachers | None = None  # who scores as the second anchor; None where there is none
    stop: list[int] = field(init=False)  # the ids that end a completion
    vocabulary: int = field(init=False)  # the number of entries that the policy gives a logit to
    objective: Objective = field(init=False)  # the loss; its beta is the one at the start
    excluded: list[int] = field(init=False)  # the ids of tokens that carry no KL
    control: KLControl = field(init=False)  # beta and the reference length, as in every host

    def __post_init__(self) -> None:
        config = self.config
        length = config.rollout.max_completion_length
        self.stop, self.vocabulary = end_tokens(self.policy, self.tokenizer), output_size(self.policy)
        self.objective = build_objective(config.kl, config.loss, max_length=length, teacher=config.teacher)
        self.excluded = excluded_ids(config.kl.kl_exclude_tokens, self.tokenizer)
        self.control = KLControl(config.kl)

    @property
    def policy(self) -> nn.Module:
        """The model being trained."""
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return next(self.policy.parameters()).device

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]

    @property
    def exact_completions(self) -> int:
        """How many completions of a group have their exact KL measured; all where the loss is made of it."""
        size, asked = self.config.rollout.num_generations, self.config.run.exact_kl_completions
        if self.config.kl.kl_estimator == "exact":
            return size
        if asked is not None:
            return min(asked, size)
        return size if self.vocabulary <= SMALL_VOCABULARY else 1

    @property
    def exact_everywhere(self) -> bool:
        """Whether those are all completions."""
        return self.exact_completions >= self.config.rollout.num_generations

    @property
    def exact_directions(self) -> tuple[Direction, ...]:
        """The directions of the exact KL that are measured; for a large vocabulary the reverse one only."""
        kl, asked = self.config.kl, self.config.run.exact_kl_completions
        in_loss = kl.kl_estimator == "exact" and kl.kl_gradient == "forward"
        if self.vocabulary <= SMALL_VOCABULARY or asked is not None or in_loss:
            return ("reverse", "forward")
        return ("reverse",)

    def parts(self, rows: int) -> Iterator[slice]:
        """The parts, nearly equal, that `rows` completions are computed in: gradient_accumulation_steps of them."""
        count = min(rows, self.config.optim.gradient_accumulation_steps)
        bounds = torch.linspace(0, rows, count + 1).round().long().tolist()
        return (slice(a, b) for a, b in pairwise(bounds) if b > a)


def check_processes(config: TrainConfig) -> None:
    """Refuse several processes, except for TRL in a folder that all of them know."""
    backend, folder = config.run.backend, config.run.output_dir
    if started_processes() == 1 or (backend == "trl" and folder is not None):
        return
    why, fix = {
        "local": ("each would train its own model", "for several GPUs use --backend trl or --backend verl"),
        "verl": ("verl starts its processes itself", "start it without a launcher"),
        "trl": ("each of them would take another free folder", "name it: --output_dir runs/NAME"),
    }[backend]
    what = "several processes need output_dir" if backend == "trl" else f"backend={backend!r} runs in one process"
    raise ConfigError(what, got=f"WORLD_SIZE={started_processes()}, output_dir={folder}", why=why, fix=fix)


def load_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, longest: int | None) -> Task:
    """The task of a run, each of whose prompts leaves room for a completion.

    `longest`: tokens that the model can hold, prompt and completion together; None: no limit.
    """
    caution_beside("transformers")
    task = load_task(config.task, tokenizer)
    check_prompts([*task.train, *held_out(task)], tokenizer, longest, config.rollout.max_completion_length)
    return task


def held_out(task: Task) -> list[Example]:
    """The held-out prompts of all skills."""
    return [example for rows in task.evaluation.values() for example in rows]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was found when the inputs of a run were opened."""

    training: int  # prompts to train on
    held_out: int  # prompts that are held out, of all skills
    longest: int  # tokens of the longest prompt


def open_inputs(config: TrainConfig) -> Inputs:
    """Open the tokenizer, the prompts and the reward of a run as the run itself will, without its weights."""
    model, named = config.model.model, config.model.tokenizer or config.model.model
    # the built-in model may have to be taught first; its tokenizer need not
    tokenizer = ready_tokenizer(arithmetic_tokenizer(), named) if named == BUILTIN else load_tokenizer(named)
    room = MAX_MODEL_LENGTH if model == BUILTIN else length_of(model)
    task = load_task(config.task, tokenizer)
    every = [*task.train, *held_out(task)]
    longest = check_prompts(every, tokenizer, room, config.rollout.max_completion_length)
    return Inputs(training=len(task.train), held_out=len(every) - len(task.train), longest=longest)


def build(config: TrainConfig, folder: Path, observers: Sequence[Observer], *, resumed: Path | None = None) -> Context:
    """Load all that a run needs: policy (of the checkpoint `resumed`) with its adapter, scorer, anchors, task."""
    name, kind = config.model.model, reference_kind(config)
    make_ready(name, progress=progress_of(observers))
    start = load_model(name, config.model.dtype)
    tokenizer = load_tokenizer(config.model.tokenizer or name)
    if len(tokenizer) > (size := rows_of(start.get_input_embeddings())):  # pyright: ignore[reportArgumentType]
        raise ModelError(
            "the tokenizer has more tokens than the model",
            got=f"tokenizer {len(tokenizer)}, model {size} ({config.model})",
            why="some prompts would have no embedding",
            fix="use the model's own tokenizer",
        )
    task = load_prompts(config, tokenizer, longest=max_length(start))
    remote = connect(config, task, tokenizer) if kind == "remote" else None
    copied = None
    if kind == "frozen":  # before the policy has an adapter: its padding may be cut
        named = config.model.ref_model is not None
        copied = load_reference(config, start, tokenizer) if named else copy.deepcopy(start)
    policy = _policy(start, config, resumed)
    scorer = Scorer(policy, probe(policy))
    reference, original = (remote, None) if remote else _references(config, kind, scorer, copied)
    return Context(
        config=config,
        output_dir=folder,
        scorer=scorer,
        tokenizer=tokenizer,
        task=task,
        reference=reference,
        original=original,
        teachers=load_teachers(config, scorer, task, tokenizer),
    )


def _policy(start: nn.Module, config: TrainConfig, resumed: Path | None) -> nn.Module:
    """The model that is trained: with its adapter, of a checkpoint where a run goes on, on its device."""
    model, policy = config.model, start
    set_seed(config.run.seed)  # adapters start from random numbers
    try:
        if model.lora_r:
            policy = with_adapter(start, model, resumed and resumed / POLICY)  # pyright: ignore
        elif resumed:
            policy = load_model(str(resumed / POLICY), model.dtype)
    except ModelError as error:
        if resumed is None:
            raise
        raise checkpoint.damaged(resumed, error) from error
    if model.gradient_checkpointing:
        with former_names():  # transformers 5.23 calls it activation_checkpointing_enable
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
        policy.train()
    return policy.to(device_of(config))  # pyright: ignore[reportArgumentType]


def _references(
    config: TrainConfig, kind: str, scorer: Scorer, copied: nn.Module | None
) -> tuple[Reference | None, Reference | None]:
    """The reference of a run, and for a moving one the model that it started from."""
    kl, policy, traits = config.kl, scorer.model, scorer.traits
    moves = {"decay": kl.reference_decay, "reset_steps": kl.reference_reset_steps}
    if copied is not None:
        named = config.model.ref_model
        name, known = (f"{named}, frozen", None) if named else ("a frozen copy of the starting policy", traits)
        return FrozenReference(placed(copied, config), name=name, traits=known), None
    if kind == "adapter_off":
        return of_policy(kind, policy, traits, **moves), None
    if kind not in ("ema", "periodic"):
        return None, None
    started = policy
    if config.run.resume:  # the policy as it was before the first step
        started = _policy(load_model(config.model.model, config.model.dtype), config, None)
    moving, original = (placed(copy.deepcopy(started), config) for _ in range(2))
    return of_policy(kind, moving, traits, **moves), FrozenReference(original, traits=traits)
