"""`klamp train --backend tinker`: klamp's trainer with the weights at a service of the Tinker SDK.

Prompts, rewards, advantages, the KL, its controller, metrics and the run's folder are those of the local trainer. At
the service are the weights and their optimizer: a snapshot samples, a client of the base model is the reference, the
gradient of klamp's loss goes there through a custom loss, and checkpoints are saved there; the run's folder keeps
their tinker:// path beside the state of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.config import build_objective
from klamp.errors import ModelError
from klamp.hosts.common.exclusions import excluded_ids
from klamp.training import checkpoint
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.models import load_tokenizer, ready_tokenizer
from klamp.training.observers import Observer, RunSummary
from klamp.training.processes import check_alone
from klamp.training.runlog import RunLog, begin_trackers
from klamp.training.service import rollout as rollouts
from klamp.training.service.connection import Connection, check_key
from klamp.training.service.tinker_trainer import RemoteWeights, TinkerTrainer, measure_length
from klamp.training.setup import load_prompts, make_accelerator, opened_folder

DEFAULT_RANK = 32
"""Rank of the adapter where lora_r is 0: the service trains adapters only."""


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Train a configuration with backend `tinker` to its last step, from its newest checkpoint if it has one.

    The service is the one that the SDK finds: TINKER_BASE_URL (else the hosted one) with TINKER_API_KEY.

    Args:
        config: what to run; `model` is the name of a base model of the service.
        observers: told what happens; the run's folder and trackers are served besides.

    Raises:
        ConfigError: no key, or several processes; before any work.
        KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
    """
    check_key()
    check_alone(config, why="the work is done at the service")
    with opened_folder(config) as folder:
        accelerator = make_accelerator(config, folder)
        connection: Connection | None = None
        try:
            connection = Connection(config.run.service_timeout)
            client = _training_client(connection, config, folder)
            context = _context(config, folder, accelerator, connection, client)
            trainer = TinkerTrainer(context, [RunLog(accelerator), *observers], connection, client)
            if config.run.resume:
                trainer.resume()
            trainer.tell(lambda o: o.on_start(trainer.info()))
            begin_trackers(accelerator, config, folder, done=trainer.step)
            if trainer.step == 0:
                measure_length(context, connection)
            return trainer.run()
        finally:
            for observer in observers:
                observer.close()
            accelerator.end_training()
            if connection is not None:
                connection.close()


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


def _reference(connection: Connection, config: TrainConfig) -> rollouts.TinkerReference | None:
    """A sampling client of the model before training, or of the model that ref_model names."""
    if not config.kl.needs_reference:
        return None
    name = config.model.ref_model or config.model.model
    source = {"model_path": name} if name.startswith("tinker://") else {"base_model": name}
    client = connection.ask(f"sample from {name}", lambda: connection.service.create_sampling_client(**source))
    return rollouts.TinkerReference(connection, client, f"{name} at the service, frozen")


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


def _context(config: TrainConfig, folder: Path, accelerator: Any, connection: Connection, client: Any) -> Context:
    """The shared parts of a run whose weights are at the service."""
    tokenizer = _tokenizer(connection, config, client)
    task = load_prompts(config, tokenizer, longest=None)
    policy = RemoteWeights()
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=policy,
        wrapped=policy,
        reference=_reference(connection, config),
        original=None,
        excluded=excluded_ids(config.kl.kl_exclude_tokens, tokenizer),
        tokenizer=tokenizer,
        task=task,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        stop=[],
        vocabulary=len(tokenizer),
    )
