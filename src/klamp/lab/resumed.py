"""What a resume may change, and which run goes on.

Each checkpoint holds `identity.json`: the run's ID, its configuration, and SHA-256 of its model and data. A resume
compares the new configuration with the stored one. `config.yaml` holds what is in force now, and under `history` what
was in force until which step; readers of a run use it, a resume does not.
"""

from __future__ import annotations

import hashlib
import math
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from klamp.doctor.readers.files import object_in
from klamp.doctor.readers.klamp_run import HISTORY, UNTIL, changes_of, history_of, in_force, in_words, shown
from klamp.errors import ConfigError, KLWarning, RunFolderError
from klamp.files import at_home, json_of, yaml_of
from klamp.lab.config import TrainConfig, field_owners, reference_kind
from klamp.lab.folders import OWN, SEAL, checkpoint_folders, number_of, policy_folder, policy_in
from klamp.lab.tasks.base import has_own_prompts
from klamp.lab.tasks.base_model import base_model_folder
from klamp.names import CONFIG, IDENTITY

IDENTIFIED = ("model", "ref_model", "teacher_model", "tokenizer", "task", "eval_split")
"""Fields that name a model or data: another name of the same contents is the same run."""
ADDRESSES = ("reference_url", "teacher_url")
"""Fields that say where a server is: its answers are compared, see `klamp.lab.evaluation`."""
MAY_CHANGE = (
    *("max_steps", "learning_rate", "max_grad_norm", "beta", "target_kl", "kl_controller", "stop_on"),
    *("save_every", "keep_checkpoints", "eval_every"),
    *("log_completions", "log_completions_every", "log_answers", "report_to"),
)
"""All other fields that a resume may change: what people change after a spike, saving, evaluation and logging."""


def check_resume(config: TrainConfig, folder: Path) -> tuple[int, str] | None:
    """The steps that are done, and what a resume changes in words; None: no step is done, so that all may change."""
    newest = newest_complete(folder) if config.run.resume else None
    if newest is None:
        return None
    stored = identity_in(newest if (newest / IDENTITY).is_file() or newest.name.startswith(OWN) else folder)
    was = config_of(stored["config"])
    step = number_of(newest) // (was.optim.num_iterations if was.run.backend == "trl" else 1)
    before, now, sums = plain(was), plain(config), sums_of(config)
    changes = changes_of(before, now)
    known = {name: (saved, sums[name]) for name, saved in stored["sha256"].items() if saved and sums.get(name)}
    moved = {name for name, (saved, given) in known.items() if saved == given}
    for name in known.keys() - moved:
        changes[name] = (f"{before[name]} {known[name][0]}", f"{now[name]} {known[name][1]}")
    refused = dict.fromkeys(changes.keys() - {*MAY_CHANGE, *ADDRESSES, *moved}, "a resume continues what was saved")
    if reference_kind(config) in ("ema", "periodic") and reference_kind(was) == "none":
        refused["beta"] = "a reference that moves comes from the checkpoint, and the run had no reference"
    if config.run.max_steps < step:
        refused["max_steps"] = f"{step} steps are done; to go back, delete the newer checkpoints"
    if name := next((name for name in changes if name in refused), ""):
        raise ConfigError(
            f"a resume cannot change {name}",
            got=f"{in_words({name: changes[name]})}, after step {step} of {folder}",
            why=refused[name],
            fix=f"leave {name} as it was, or {new_run(newest)}",
        )
    return step, in_words(changes)


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint of a run, of TRL's those that are complete; None: there is none."""
    saved = reversed(checkpoint_folders(folder))
    return next((each for each in saved if not each.name.startswith("checkpoint-") or (each / SEAL).is_file()), None)


def new_run(checkpoint: Path) -> str:
    """How to start a new run from a checkpoint."""
    return f"start a new run from that checkpoint: klamp train --model {policy_in(checkpoint)} --output_dir NEW"


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain data for YAML and trackers: lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}


# which run it is ------------------------------------------------------------------------------------------------------

SUMMED = (".safetensors", ".bin", ".json", ".model", ".txt")
"""The files of a folder that make a model what it is."""


def identity(config: TrainConfig, stored: Path | None = None) -> dict[str, Any]:
    """What each checkpoint stores of its run; a run that goes on keeps the ID and the sums that a folder stores."""
    known = {"run": uuid.uuid4().hex, "sha256": sums_of(config)} if stored is None else identity_in(stored)
    return {**known, "config": plain(config)}


def identity_in(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint stores of its run."""
    try:
        found = json_of((checkpoint / IDENTITY).read_text(encoding="utf-8"))
        return {"run": str(found["run"]), "config": dict(found["config"]), "sha256": dict(found["sha256"])}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RunFolderError(
            "the checkpoint does not say which run it belongs to",
            got=str(checkpoint / IDENTITY),
            why=f"it is damaged, or of an older version: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix=new_run(checkpoint),
        ) from error


def sums_of(config: TrainConfig) -> dict[str, str]:
    """Field -> the SHA-256 of the model or data that it names; "" if its contents are not on this machine."""
    given = config.flat()
    return {name: _sum(given[name]) if given[name] else "" for name in IDENTIFIED}


def _sum(name: str) -> str:
    place, digest = _place(name), hashlib.sha256()
    inside = sorted(place.iterdir()) if place.is_dir() and not has_own_prompts(name) else []
    files = [each for each in inside if each.suffix in SUMMED] or [each for each in (place,) if each.is_file()]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else ""


def _place(name: str) -> Path:
    """The folder or file that a name stands for; that of a hub id is in the hub's cache."""
    if name == "builtin":
        return base_model_folder()
    place = at_home(policy_folder(name))
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # no id of the hub
            if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
                return Path(cached).parent
    return place


# config.yaml ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Any]:
    """All fields of a run's config.yaml, those that it lacks at their defaults, and its history."""
    try:
        found = dict(yaml_of((folder / CONFIG).read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, TypeError) as error:
        why, fix = " ".join(str(error).split())[:200], "put it back, or start a new run in another folder"
        raise ConfigError("the run's configuration cannot be read", got=folder / CONFIG, why=why, fix=fix) from error
    return plain(config_of(found)) | ({HISTORY: entries} if (entries := history_of(found)) else {})


def read_config(path: Path, step: float = math.inf) -> tuple[dict[str, Any], TrainConfig]:
    """The configuration of a klamp run in a step (the last by default), as written and as this version reads it."""
    values = in_force(object_in(path / CONFIG), step)
    return shown(values), config_of(values)


def config_of(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that a config.yaml holds; what is no field of this version is passed over."""
    with warnings.catch_warnings(action="ignore", category=KLWarning):  # the run gave it when it was started
        return TrainConfig.from_flat({name: value for name, value in values.items() if name in field_owners()})


def with_history(config: TrainConfig, past: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What config.yaml holds from a resume after `step` on; what it held (see `read`) of later steps is undone."""
    now = plain(config) | {"resume": False}
    entries = [each for each in history_of(past) if each[UNTIL] < step]
    if changes := changes_of(in_force(past, step), now):
        entries.append({UNTIL: step, **{name: old for name, (old, _) in changes.items()}})
    return now | ({HISTORY: entries} if entries else {})
