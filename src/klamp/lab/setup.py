"""Prepares a run up to its first step: `build` loads and checks the `Context` that all parts of the run share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from klamp.config import build_objective
from klamp.config.kl import SMALL_VOCABULARY
from klamp.core.objective import Objective
from klamp.core.types import Direction
from klamp.errors import ConfigError, ModelError
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.rollout import excluded_ids
from klamp.hosts.common.versions import caution_beside
from klamp.lab import anchors, models
from klamp.lab.anchors import LocalReference, MovingReference, Reference, Teachers
from klamp.lab.config import TrainConfig, reference_kind
from klamp.lab.observers import Observer
from klamp.lab.sizing import started_processes
from klamp.lab.tasks import load_task
from klamp.lab.tasks.arithmetic import MAX_MODEL_LENGTH
from klamp.lab.tasks.base import Task
from klamp.lab.tasks.files import check_prompts
from klamp.scoring.model_parts import output_size, rows_of
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer
from klamp.scoring.vllm_reference import Who


@dataclass(kw_only=True)
class Context:
    """What the parts of a run share: its models, its data, and the state of its controller."""

    config: TrainConfig
    scorer: Scorer  # the policy's
    tokenizer: PreTrainedTokenizerBase
    task: Task
    reference: Reference | None = None  # None if nothing here needs it
    teachers: Teachers | None = None  # the second anchor, or None
    stop: list[int] = field(init=False)  # the ids that end a completion
    pad: int = field(init=False)  # the id of the padding token
    vocabulary: int = field(init=False)  # the number of entries that the policy gives a logit to
    objective: Objective = field(init=False)  # the loss; its beta is the one at the start
    excluded: list[int] = field(init=False)  # the ids of tokens that carry no KL
    control: KLControl = field(init=False)  # beta and the reference length, as in every host

    def __post_init__(self) -> None:
        config, length = self.config, self.config.rollout.max_completion_length
        self.stop, self.vocabulary = models.end_tokens(self.policy, self.tokenizer), output_size(self.policy)
        self.pad = int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        self.objective = build_objective(config.kl, config.loss, max_length=length, teacher=config.teacher)
        self.excluded = excluded_ids(config.kl.kl_exclude_tokens, self.tokenizer)
        self.control = KLControl(config.kl)

    @property
    def policy(self) -> nn.Module:
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    @property
    def anchors(self) -> dict[str, Reference]:
        """Name -> the reference and each of the teachers."""
        teachers = {} if self.teachers is None else self.teachers.models
        named = {f"teacher {key}".strip(): model for key, model in teachers.items()}
        return named if self.reference is None else {"reference": self.reference, **named}

    @property
    def moving(self) -> dict[str, MovingReference]:
        """The anchors that follow the policy; a checkpoint holds their weights."""
        return {name: anchor for name, anchor in self.anchors.items() if isinstance(anchor, MovingReference)}

    @property
    def original(self) -> LocalReference | None:
        """The model that a moving reference started from; None if the reference does not move."""
        return self.reference.original if isinstance(self.reference, MovingReference) else None

    @property
    def exact_completions(self) -> int:
        """How many completions of a group have their exact KL measured; all if the loss uses it."""
        size, count = self.config.rollout.num_generations, self.config.run.exact_kl_completions
        if "exact" in (self.config.kl.kl_estimator, self.config.kl.kl_baseline):
            return size
        if count is not None:
            return min(count, size)
        return size if self.vocabulary <= SMALL_VOCABULARY else 1

    @property
    def exact_everywhere(self) -> bool:
        """Whether those are all completions."""
        return self.exact_completions >= self.config.rollout.num_generations

    @property
    def exact_directions(self) -> tuple[Direction, ...]:
        """The directions of the exact KL that are measured; for a large vocabulary the reverse one only."""
        kl, count = self.config.kl, self.config.run.exact_kl_completions
        in_loss = kl.kl_estimator == "exact" and kl.kl_gradient == "forward"
        if self.vocabulary <= SMALL_VOCABULARY or count is not None or in_loss:
            return ("reverse", "forward")
        return ("reverse",)

    def parts(self, rows: int) -> list[slice]:
        """Splits `rows` completions into gradient_accumulation_steps nearly equal parts."""
        count = min(rows, self.config.optim.gradient_accumulation_steps)
        bounds = torch.linspace(0, rows, count + 1).round().long().tolist()
        return [slice(a, b) for a, b in pairwise(bounds) if b > a]


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
    """The task of a run, whose prompts leave room for a completion; `longest`: tokens of both, None: no limit."""
    caution_beside("transformers")
    task = load_task(config.task, tokenizer)
    length = config.rollout.max_completion_length
    return replace(task, longest=check_prompts([*task.train, *task.held_out], tokenizer, longest, length))


def open_inputs(config: TrainConfig) -> Task:
    """The task of a run, its prompts and the positions of its anchors checked as the run will, without any weights."""
    model = config.model.model
    room = MAX_MODEL_LENGTH if model == models.BUILTIN else models.max_length(models.configuration(model))
    tokenizer, teacher = models.load_tokenizer(config.model.tokenizer or model), config.teacher
    task = load_prompts(config, tokenizer, longest=room)
    reference = config.model.ref_model if reference_kind(config) == "frozen" else None
    prompts = anchors.teacher_prompts(config, task, tokenizer) if teacher.there else {}
    anchors.check_keys(config, task, teacher.models)
    folders: dict[Who, Mapping[str, str]] = {"teacher": teacher.models if teacher.kind == "frozen" else {}}
    folders["reference"] = {"": reference} if reference else {}
    for who, names in folders.items():
        own = {key: name for key, name in names.items() if name != models.BUILTIN}
        rooms = {key: models.max_length(models.configuration(name)) for key, name in own.items()}
        anchors.check_rooms(config, task, tokenizer, rooms, prompts if who == "teacher" else {}, who=who)
    return task


def build(config: TrainConfig, observers: Sequence[Observer] = (), *, resumed: Path | None = None) -> Context:
    """Load all that a run needs: policy (of the checkpoint `resumed`) with its adapter, scorer, anchors, task."""
    model = config.model

    def progress(what: str, done: int, total: int, loss: float | None) -> None:
        for observer in observers:
            observer.on_loading(what, done, total, loss)

    models.make_ready(model.model, progress=progress)
    start = models.load_model(model.model, model.dtype)
    tokenizer = models.load_tokenizer(model.tokenizer or model.model)
    if len(tokenizer) > (size := rows_of(start.get_input_embeddings())):  # pyright: ignore[reportArgumentType]
        what, got = "the tokenizer has more tokens than the model", f"tokenizer {len(tokenizer)}, model {size}"
        raise ModelError(what, got=got, why="some prompts would have no embedding", fix="use the model's own tokenizer")
    task = load_prompts(config, tokenizer, longest=models.max_length(start.config))
    own = anchors.frozen_start(config, start, tokenizer)  # before the policy has an adapter
    policy = models.load_policy(config, start, resumed)
    scorer = Scorer(policy, probe(policy))
    return Context(
        config=config,
        scorer=scorer,
        tokenizer=tokenizer,
        task=task,
        reference=anchors.load_reference(config, scorer, own, task, tokenizer),
        teachers=anchors.load_teachers(config, scorer, task, tokenizer),
    )
