"""`klamp train --backend tinker`: klamp's trainer with the weights at a service of the Tinker SDK.

Prompts, rewards, advantages, the KL, its controller, metrics and the run's folder are those of the local trainer. At
the service are the weights and their optimizer: a snapshot samples, a client of the base model is the reference, one of
a base model or of saved weights a teacher; the gradient of klamp's loss goes there through a custom loss. Checkpoints
are saved there; the run's folder keeps their tinker:// path beside the state of the run. The service is the one that
the SDK finds: TINKER_BASE_URL (else the hosted one) with TINKER_API_KEY.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import Tensor, cat, nn, zeros
from transformers import PreTrainedTokenizerBase

from klamp.core.objective import Objective, Weighted
from klamp.errors import KlampError, ModelError
from klamp.hosts.common.teachers import check_tokens
from klamp.scoring.completions import Completions
from klamp.scoring.vllm_reference import Who
from klamp.tasks.base import Example
from klamp.training import checkpoint
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.evaluation import Evaluation, evaluated, probabilities
from klamp.training.models import load_tokenizer, ready_tokenizer
from klamp.training.observers import Observer, RunInfo
from klamp.training.processes import check_alone
from klamp.training.rollouts import LENGTH_PROMPTS, Rollout, needs_reference_length, rate
from klamp.training.service import calls
from klamp.training.service.calls import PartLoss, TinkerReference
from klamp.training.service.connection import Connection, check_key
from klamp.training.setup import load_prompts
from klamp.training.teachers import teachers_of
from klamp.training.trainer import Trainer
from klamp.training.updates import UpdateOutput, added_parts, check_held, kl_from_old, named_losses

LAST_WAIT = 60.0
"""Longest wait in seconds for the state to be saved after an error: the service may be the reason for it."""
EPS = 1e-8
"""AdamW's epsilon, that of klamp's own trainer; the SDK's default is 1e-12."""
DEFAULT_RANK = 32
"""Rank of the adapter where lora_r is 0: the service trains adapters only."""


class TinkerTrainer(Trainer):
    """klamp's trainer, with sampling, gradients, evaluation and checkpoints at the service."""

    step_zero_kl = 0.01  # sampler and trainer of a service are not the same kernels

    def __init__(self, context: Context, observers: Sequence[Observer], connection: Connection, client: Any) -> None:
        super().__init__(context, observers)
        self.connection, self.client = connection, client
        self._snapshot: TinkerReference | None = None
        self._saved: tuple[int, str] | None = None

    @staticmethod
    def refuse(config: TrainConfig) -> None:
        """Refuse to start without a key, or in several processes."""
        check_key()
        check_alone(config, why="the work is done at the service")

    @classmethod
    def build(
        cls, config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer], last: ExitStack
    ) -> Self:
        """Open a session, which is closed after everything else, and have the service load the weights."""
        connection = Connection(config.run.service_timeout)
        last.callback(connection.close)
        client = _training_client(connection, config, folder)
        tokenizer = _tokenizer(connection, config, client)
        task = load_prompts(config, tokenizer, longest=None)
        context = Context(
            config=config,
            output_dir=folder,
            accelerator=accelerator,
            policy=nn.ParameterList([zeros(1)]),  # no weights: a number whose optimizer carries the schedule
            reference=_reference(connection, config, tokenizer),
            tokenizer=tokenizer,
            teachers=teachers_of(config, task, tokenizer, lambda name: _teacher(connection, config, tokenizer, name)),
            task=task,
            stop=[],
            vocabulary=len(tokenizer),
        )
        return cls(context, observers, connection, client)

    def cautions(self) -> tuple[str, ...]:
        """None: which tokens end a completion, the service alone knows."""
        return ()

    def measure_length(self) -> None:
        """Measure and set the run's reference length, where a clip needs one: 64 completions of the reference."""
        measure_length(self.context)

    def sampler(self) -> TinkerReference:
        """The present weights, to sample from; they are kept until they change."""
        if self._snapshot is None:
            take = self.client.save_weights_and_get_sampling_client
            client = self.connection.ask("take a snapshot to sample from", take)
            self._snapshot = TinkerReference(self.connection, client, "the policy")
        return self._snapshot

    def collect(self, beta: float, others: Sequence[Weighted]) -> Rollout:
        """Sample and rate the completions of this step; the sampler is the old policy of the ratios."""
        examples = self.prompts(self.step)
        completions = calls.collect(self.context, self.sampler(), examples, self.step)
        size = self.context.config.rollout.num_generations
        chosen = [example for example in examples for _ in range(size)]
        return rate(
            self.context, chosen, completions, beta=beta, others=others, old_logprobs=completions.sampler_logprobs
        )

    def update(self, rollout: Rollout, objective: Objective) -> UpdateOutput:
        """Do one optimizer step with a rollout, in `gradient_accumulation_steps` calls whose gradients add up.

        Raises:
            NonFiniteError: the loss, the KL or the log-probabilities are NaN or infinite; the weights are as before.
            ModelError: the service fails.
        """
        context, client = self.context, self.client
        seen: list[Tensor] = []
        sums: dict[str, float] = {}
        for part in context.parts(len(rollout.texts)):
            loss = PartLoss(context, rollout, part, objective)
            if loss.rows:
                data = loss.datums(self.connection.tinker)
                self.connection.ask("compute gradients", lambda d=data, f=loss: client.forward_backward_custom(d, f))
            if loss.error is not None:
                raise loss.error
            seen.append(loss.logprobs)
            for name, value in (added_parts(loss.metrics, rollout, part) | loss.sums).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        policy = cat(seen)
        check_held(context, sums)
        return UpdateOutput(
            policy_logprobs=policy,
            losses=named_losses(sums),
            grad_norm=self._step(),
            kl_old=kl_from_old(context, rollout, policy),
        )

    def _step(self) -> float | None:
        """Do one AdamW step at the service; the norm of the gradient, if the service tells it."""
        self._snapshot = None
        self.optimizer.step()  # moves nothing here; notes that the weights are between two steps
        optim = self.context.config.optim
        params = self.connection.tinker.AdamParams(
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=EPS,
            weight_decay=optim.weight_decay,
            grad_clip_norm=optim.max_grad_norm,
        )
        answer = self.connection.ask("take an optimizer step", lambda: self.client.optim_step(params))
        norms = [value for name, value in (answer.metrics or {}).items() if "grad_norm" in name]
        return norms[0] if norms else None

    def examine(self) -> Evaluation:
        """Every skill's score now, and some answers."""
        return evaluate(self.context, self.sampler())

    def write(self) -> Path:
        """Save weights and optimizer at the service, and the run's state with their path in the folder."""
        if self._saved is None or self._saved[0] != self.step:
            name = f"{self.context.output_dir.name}-step-{self.step:06d}"
            self._saved = (self.step, self.connection.ask("save the state", lambda: self.client.save_state(name)).path)
        state = self._state() | {"tinker_path": self._saved[1]}
        keep = self.context.config.run.keep_checkpoints
        return checkpoint.write(self.context.output_dir, self.step, lambda part: None, state=state, keep=keep)

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from and its checkpoint; if the service fails now too, the newest one in the folder."""
        self.connection.seconds = min(self.connection.seconds, LAST_WAIT)
        try:
            return super().kept()
        except KlampError:
            self.whole = False
            return super().kept()

    def resume(self) -> None:
        """Continue from the newest checkpoint; the client has its weights already."""
        folder = checkpoint.newest(self.context.output_dir)
        if folder is not None:
            self.load(folder)

    def info(self) -> RunInfo:
        """What is known of the run before its first step; the service does not say how many weights there are."""
        return replace(super().info(), parameters=0, trainable_parameters=0, device=f"Tinker, {self.connection.where}")


def evaluate(context: Context, policy: TinkerReference) -> Evaluation:
    """Decode every held-out prompt greedily from the policy's weights and score it (or read it there)."""

    def write(examples: Sequence[Example]) -> list[str]:
        return context.tokenizer.batch_decode(
            policy.answers(context, examples, temperature=0.0), skip_special_tokens=True
        )

    def logprobs(given: Completions) -> Tensor:
        return policy.score(given, temperature=1.0).logprobs

    return evaluated(
        context, write=write, read=lambda rows: probabilities(rows, context.tokenizer, context.device, logprobs)
    )


def measure_length(context: Context) -> None:
    """Measure and set the run's reference length, where a clip needs one: 64 completions of the reference."""
    reference = context.reference
    if isinstance(reference, TinkerReference) and needs_reference_length(context):
        rows = reference.answers(context, context.task.train[:LENGTH_PROMPTS], temperature=1.0)
        context.control.take_length(sum(map(len, rows)) / len(rows))


def _training_client(connection: Connection, config: TrainConfig, folder: Path) -> Any:
    """A training client with a fresh adapter, or with the newest checkpoint's adapter and optimizer."""
    service, model = connection.service, config.model
    newest = checkpoint.whole_newest(folder) if config.run.resume else None
    if newest is None:
        rank = model.lora_r or DEFAULT_RANK
        return connection.ask(
            f"train an adapter of {model.model}",
            lambda: service.create_lora_training_client(base_model=model.model, rank=rank, seed=config.run.seed),
        )
    path = checkpoint.load_state(newest).get("tinker_path")
    if path is None:
        raise checkpoint.damaged(newest, KeyError("tinker_path: it was saved by another backend"))
    return connection.ask(f"load {path}", lambda: service.create_training_client_from_state_with_optimizer(path))


def _reference(
    connection: Connection, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> TinkerReference | None:
    """A sampling client of the model before training, or of the model that ref_model names."""
    if not config.kl.needs_reference:
        return None
    name = config.model.ref_model or config.model.model
    client = _anchor_client(connection, config, tokenizer, name, "reference")
    return TinkerReference(connection, client, f"{name} at the service, frozen")


def _teacher(
    connection: Connection, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> TinkerReference:
    """A sampling client of a teacher, whose tokens are the policy's; without a name of the model before training."""
    name = name or config.model.model
    client = _anchor_client(connection, config, tokenizer, name, "teacher")
    said, top_k = f"{name} at the service, frozen", config.teacher.head_size
    return TinkerReference(connection, client, said, top_k=top_k, vocabulary=len(tokenizer))


def _anchor_client(
    connection: Connection, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, name: str, who: Who
) -> Any:
    """A sampling client of a reference or a teacher; refuses one with other tokens than the policy."""
    source = {"model_path": name} if name.startswith("tinker://") else {"base_model": name}
    client = connection.ask(f"sample from {name}", lambda: connection.service.create_sampling_client(**source))
    if connection.ask(f"name the base model of {name}", client.get_base_model) != config.model.model:
        theirs = None
        with suppress(ModelError):
            theirs = ready_tokenizer(connection.ask(f"name the tokenizer of {name}", client.get_tokenizer), name)
        check_tokens(theirs, tokenizer, name=name, who=who)
    return client


def _tokenizer(connection: Connection, config: TrainConfig, client: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that the configuration names, or the one of the base model."""
    if config.model.tokenizer:
        return load_tokenizer(config.model.tokenizer)
    try:
        tokenizer = connection.ask("name its tokenizer", client.get_tokenizer)
    except ModelError as error:
        error.add_note("  --tokenizer takes a folder or a hub id where the SDK finds none")
        raise
    return ready_tokenizer(tokenizer, config.model.model)
