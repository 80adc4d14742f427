"""Checkpoints: weights as safetensors, the optimizer as tensors (no code is run to load them), the rest as JSON.

    checkpoints/step-000050/policy/         save_pretrained: loads anywhere
    checkpoints/step-000050/optimizer.pt    loads with weights_only=True
    checkpoints/step-000050/reference.safetensors   only if the reference moves; so teacher.safetensors
    checkpoints/step-000050/state.json      step, controller, reference length, fingerprints
    checkpoints/step-000050/identity.json   the run's ID and configuration, SHA-256 of its model and data
    checkpoints/step-000050/checksums.json  SHA-256 of all other files

It is written to a temporary folder and renamed once it is on the disk: a killed run leaves a whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim import Optimizer

from klamp.doctor.readers.klamp_run import changes_of, in_words
from klamp.errors import ConfigError, RunFolderError
from klamp.files import at_home, followed, json_of
from klamp.lab import folders
from klamp.lab.config import WATCHING, TrainConfig, reference_kind
from klamp.lab.folders import CHECKPOINTS, OWN, POLICY, SEAL, checkpoints, sync, write_whole
from klamp.lab.tasks.arithmetic import base_model_folder, make_readable, without_bars
from klamp.lab.tasks.base import has_own_prompts
from klamp.names import IDENTITY, SUMMARY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATE_FILE = "state.json"  # the file of a checkpoint that holds what changes from step to step besides the weights
IDENTIFIED = ("model", "ref_model", "teacher_model", "tokenizer", "task", "eval_split")
"""Fields that name a model or data: another name of the same contents is the same run."""
ADDRESSES = ("reference_url", "teacher_url")  # of servers, whose answers `klamp.lab.evaluation` compares
MAY_CHANGE = (*WATCHING, "max_steps", "learning_rate", "max_grad_norm", "beta", "target_kl", "kl_controller")
"""All other fields that a resume may change: what people change after a spike, and what it saves and logs."""
SUMMED = (".safetensors", ".bin", ".json", ".model", ".txt")  # the files of a folder that make a model what it is


class Weights(NamedTuple):
    """What a checkpoint holds besides its JSON files."""

    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    anchors: Mapping[str, nn.Module]  # the references and teachers that move, by name


def save(
    output_dir: Path, step: int, weights: Weights, documents: Mapping[str, Mapping[str, Any]], *, keep: int
) -> Path:
    """Write the checkpoint of a step completely or not at all, and delete all but the newest `keep`.

    `documents`: name of a JSON file -> its content.
    """
    folder = output_dir / CHECKPOINTS / f"{OWN}{step:06d}"
    part = folders.part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        with without_bars():
            weights.policy.save_pretrained(str(part / POLICY))  # pyright: ignore[reportCallIssue]
        weights.tokenizer.save_pretrained(str(part / POLICY))
        torch.save(weights.optimizer.state_dict(), part / "optimizer.pt")
        for name, model in weights.anchors.items():
            save_model(model, str(part / f"{name}.safetensors"))
        for name, content in documents.items():
            (part / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        seal(part)
        for path in (*output_dir.glob("*.jsonl"), output_dir):
            sync(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # as torch and safetensors raise if the disk is full
        shutil.rmtree(part, ignore_errors=True)
        raise folders.unwritable(output_dir, error) from error
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    sync(folder.parent)
    folders.tidy(output_dir, keep=keep)
    return folder


def whole_newest(output_dir: Path) -> Path | None:
    """The newest checkpoint, each of its files read and compared; None if the run was killed before its first."""
    saved = checkpoints(output_dir)
    if saved:
        check(saved[-1])
        return saved[-1]
    if folders.checkpoint_folders(output_dir) or (output_dir / SUMMARY).exists():
        why = "resume continues a run from its newest checkpoint, with the backend that wrote it"
        fix = "check --output_dir and --backend, or start anew without --resume in another folder"
        raise RunFolderError("there is no checkpoint to continue from", got=str(output_dir), why=why, fix=fix)
    return None


def seal(folder: Path) -> None:
    """Write the SHA-256 of every file of a complete checkpoint into one file, once they are on the disk."""
    make_readable(folder)
    for path in (*folder.rglob("*"), folder):
        sync(path)
    write_whole(folder / SEAL, json.dumps(checksums(folder), indent=2))


def checksums(folder: Path, inside: Path | None = None) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint, or of a folder in it, but for hidden ones, as file managers leave."""
    sums: dict[str, str] = {}
    for file in sorted((inside or folder).rglob("[!.]*")):
        if file.is_file() and file.name != SEAL:
            sums[file.relative_to(folder).as_posix()] = sha256(file)
    return sums


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check(checkpoint: Path, inside: Path | None = None) -> None:
    """Refuse a checkpoint, of whichever backend, whose files are not those that were written.

    `inside`: the folder in it whose files alone are compared.
    """
    with reading(checkpoint):
        written = json_of((checkpoint / SEAL).read_text(encoding="utf-8"))
        present, within = checksums(checkpoint, inside), inside or checkpoint
        names = {name for name in written if (checkpoint / name).is_relative_to(within)} | present.keys()
        if changed := sorted(name for name in names if written.get(name) != present.get(name)):
            raise ValueError(f"{', '.join(changed)} changed on the disk since it was written")


def check_policy(folder: Path) -> None:
    """Refuse the weights of a model or adapter in a checkpoint that are not those that were written."""
    inside = followed(folder)
    for checkpoint in (inside, inside.parent):
        if (checkpoint / SEAL).exists() or (checkpoint / STATE_FILE).exists():
            check(checkpoint, inside)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """A context that reports an error of reading as a damaged checkpoint."""
    try:
        yield
    except Exception as error:  # a damaged file makes each of its readers raise another one
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> RunFolderError:
    """The error for a checkpoint that cannot be read; names the checkpoint before it."""
    saved = folders.checkpoint_folders(folders.run_of(checkpoint))
    older = saved[: saved.index(checkpoint)] if checkpoint in saved else []
    fix = f"delete that folder; {f'the checkpoint before it is {older[-1]}' if older else 'it is the oldest one'}"
    why = f"{type(error).__name__}: {error}"
    return RunFolderError("the checkpoint is damaged", got=str(checkpoint), why=why, fix=fix)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint."""
    with reading(checkpoint):
        state = json_of((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if missing := sorted({"step", "controller", "reference_length"} - state.keys()):
            raise ValueError(f"{STATE_FILE} lacks {', '.join(missing)}")
        if repr(state["step"]) != repr(folders.number_of(checkpoint)):
            raise ValueError(f"step in {STATE_FILE} is {reprlib.repr(state['step'])}")
        return state


def load_weights(checkpoint: Path, weights: Weights) -> None:
    """Load the moments of the optimizer, and the weights of the references and teachers that move."""
    with reading(checkpoint):
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)  # runs no code
        weights.optimizer.load_state_dict(saved)
        for name, model in weights.anchors.items():
            load_model(model, str(checkpoint / f"{name}.safetensors"))


def check_resume(config: TrainConfig, folder: Path) -> tuple[int, str] | None:
    """The steps that are done, and what a resume changes in words; None: no step is done, so that all may change."""
    newest = folders.newest_complete(folder) if config.run.resume else None
    if newest is None:
        return None
    stored = identity_in(newest if (newest / IDENTITY).is_file() or newest.name.startswith(OWN) else folder)
    was = folders.config_of(stored["config"])
    step = folders.number_of(newest) // (was.optim.num_iterations if was.run.backend == "trl" else 1)
    before, now, sums = folders.plain(was), folders.plain(config), sums_of(config)
    changes = changes_of(before, now)
    saved_sums = {name: digest for name, digest in stored["sha256"].items() if digest and sums.get(name)}
    moved = {name for name, digest in saved_sums.items() if digest == sums[name]}
    others = saved_sums.keys() - moved
    changes |= {name: (f"{before[name]} {saved_sums[name]}", f"{now[name]} {sums[name]}") for name in others}
    refused = dict.fromkeys(changes.keys() - {*MAY_CHANGE, *ADDRESSES, *moved}, "a resume continues what was saved")
    moving = ("ema", "periodic")
    if reference_kind(config) in moving and reference_kind(was) not in moving:
        name = "reference" if "reference" in changes else "beta"
        refused[name] = "a reference that moves comes from the checkpoint, and the run had no reference that moves"
    if config.run.max_steps < step:
        refused["max_steps"] = f"{step} steps are done; to go back, delete the newer checkpoints"
    if name := next((name for name in changes if name in refused), ""):
        got, why = f"{in_words({name: changes[name]})}, after step {step} of {folder}", refused[name]
        fix = f"leave {name} as it was, or {new_run(newest)}"
        raise ConfigError(f"a resume cannot change {name}", got=got, why=why, fix=fix)
    return step, in_words(changes)


def new_run(checkpoint: Path) -> str:
    """How to start a new run from a checkpoint, for errors."""
    return f"start a new run from that checkpoint: klamp train --model {folders.policy_in(checkpoint)} --output_dir NEW"


def identity(config: TrainConfig, stored: Path | None = None) -> dict[str, Any]:
    """What each checkpoint stores of its run; a run that goes on keeps the ID and the sums that a folder stores."""
    origin = {"run": uuid.uuid4().hex, "sha256": sums_of(config)} if stored is None else identity_in(stored)
    return {**origin, "config": folders.plain(config)}


def identity_in(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint stores of its run: ID, configuration, fingerprints."""
    try:
        stored = json_of((checkpoint / IDENTITY).read_text(encoding="utf-8"))
        return {"run": str(stored["run"]), "config": dict(stored["config"]), "sha256": dict(stored["sha256"])}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        what, got = "the checkpoint does not say which run it belongs to", str(checkpoint / IDENTITY)
        why = f"it is damaged, or of an older version: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RunFolderError(what, got=got, why=why, fix=new_run(checkpoint)) from error


def sums_of(config: TrainConfig) -> dict[str, str]:
    """Field -> the SHA-256 of the model or data that it names; "" if its contents are not on this machine."""
    values = config.flat()
    return {name: _sum(values[name]) if values[name] else "" for name in IDENTIFIED}


def _sum(name: str) -> str:
    place, digest = _place(name), hashlib.sha256()
    inside = sorted(place.iterdir()) if place.is_dir() and not has_own_prompts(name) else []
    files = [file for file in inside if file.suffix in SUMMED] or [place] * place.is_file()
    for file in files:
        digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest() if files else ""


def _place(name: str) -> Path:
    """The folder or file of a name; a hub id's is in the hub's cache."""
    if name == "builtin":
        return base_model_folder()
    place = at_home(folders.policy_folder(name))
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # no id of the hub
            if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
                return Path(cached).parent
    return place
