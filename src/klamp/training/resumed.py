"""What a resume may change, one table for all backends; what it did change; and which run it is that goes on.

`config.yaml` holds what is in force now, and under `history` what was in force until which step. `identity.json` says
which model and data a run has: their names, and sums of their contents.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError, KLWarning
from klamp.tasks.base import has_own_prompts
from klamp.tasks.base_model import BaseModelConfig, base_model_folder
from klamp.tasks.files import json_of, yaml_of
from klamp.tasks.paths import at_home
from klamp.training.config import Backend, TrainConfig, field_owners, reference_kind
from klamp.training.folders import CONFIG, SEAL, checkpoint_folders, number_of, policy_folder

HISTORY, UNTIL, IDENTITY = "history", "until", "identity.json"
PLACE = ("output_dir", "resume")
"""Fields that say where a run is, and are no part of it."""
IDENTIFIED = ("model", "ref_model", "teacher_model", "tokenizer", "task", "eval_split")
"""Fields that are the run's identity: another name of the same contents is the same run."""
ADAPTER = "the saved adapter and its moments have that shape"
PROMPTS = "the scores before and after would be of other prompts"
FIXED: Mapping[str, str] = {
    "backend": "a checkpoint is read by the backend that wrote it",
    "dtype": "weights and moments were saved in the former one",
    "master_weights": "the optimizer was saved with the float32 copies, or without",
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_target_modules"), ADAPTER),
    "teacher_models": "each prompt's teacher is part of what was learned",
    "seed": "the order of prompts and all draws come from it",
    **dict.fromkeys(("prompt_column", "answer_column", "skill_column", "chat_template", "system_prompt"), PROMPTS),
    **dict.fromkeys(("eval_size", "task_seed"), PROMPTS),
}
"""Fields that no resume can change, and why; of every field that is in no table here, the new value counts."""
FIXED_BY: Mapping[Backend, Mapping[str, str]] = {
    "trl": {"num_iterations": "TRL counts updates: its checkpoint would be of another step"},
    "verl": {
        **dict.fromkeys(("learning_rate", "lr_scheduler_type", "warmup_steps"), "verl loads it with its optimizer"),
        **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2"), "verl loads it with its optimizer"),
        "prompts_per_step": "verl's place in the data counts by it",
        **dict.fromkeys(("gpus", "machines"), "verl's processes read what as many wrote"),
    },
}
"""Fields that a backend cannot change besides."""


def check_resume(config: TrainConfig, folder: Path) -> tuple[int, str] | None:
    """The steps that are done, and what a resume changes in words; None: no step is done, so that all may change.

    Args:
        config: as it is to be from now on.
        folder: of the run.

    Raises:
        ConfigError: a field that cannot change, another model or data, or a configuration that cannot be read.
    """
    saved = [
        each
        for each in checkpoint_folders(folder)
        if not each.name.startswith("checkpoint-") or (each / SEAL).is_file()
    ]
    if not (config.run.resume and saved and (folder / CONFIG).is_file()):
        return None
    past = read(folder)
    step = number_of(saved[-1]) // (past["num_iterations"] if past["backend"] == "trl" else 1)
    before = in_force(past, step)
    changes, fixed = _changes(before, plain(config)), _fixed(config_of(before), config, step)
    for field, names in _others(folder, before, identity(config)).items():
        changes[field], fixed[field] = names, "its policy, KL and scores would be set beside what they do not come from"
    if name := next((name for name in changes if name in fixed), ""):
        raise ConfigError(
            f"a resume cannot change {name}",
            got=f"{in_words({name: changes[name]})}, after step {step} of {folder}",
            why=fixed[name],
            fix=f"leave {name} out, or start a new run in another folder",
        )
    return step, in_words(changes)


def _fixed(was: TrainConfig, now: TrainConfig, step: int) -> dict[str, str]:
    """Field -> why it cannot change between these two, after so many steps."""
    found = {**FIXED, **FIXED_BY.get(was.run.backend, {})}
    kind, asked = reference_kind(was), reference_kind(now)
    if asked in ("ema", "periodic") and kind != asked:
        why = f"the {asked} comes from the checkpoint, and that of a run with the reference {kind} has none"
        found |= {"reference": why, "beta": why}
    taught = now.teacher.kind
    if taught in ("ema", "periodic") and was.teacher.kind != taught:
        found["teacher_kind"] = f"the {taught} comes from the checkpoint, and that of another teacher has none"
    if was.run.backend == "verl" and now.optim.lr_scheduler_type != "constant":
        found["max_steps"] = "verl would take a step at the end of its old schedule, and jump to the new one"
    if now.run.max_steps < step:
        found["max_steps"] = f"{step} steps are done; to go back, delete the newer checkpoints"
    return found


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain data for YAML and trackers: lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (before[name], now[name]) for name in before if name not in PLACE and before[name] != now[name]}


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Changes as text: `beta 0.1 -> 0.5`."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def read(folder: Path) -> dict[str, Any]:
    """All fields of a run's config.yaml, those that it lacks at their defaults, and its history.

    Raises:
        ConfigError: it cannot be read, or is impossible in this version.
    """
    try:
        found = dict(yaml_of((folder / CONFIG).read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, TypeError) as error:
        why, fix = " ".join(str(error).split())[:200], "put it back, or start a new run in another folder"
        raise ConfigError("the run's configuration cannot be read", got=folder / CONFIG, why=why, fix=fix) from error
    return plain(config_of(found)) | ({HISTORY: entries} if (entries := history_of(found)) else {})


def config_of(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that a config.yaml holds; what is no field of this version is passed over.

    Raises:
        ConfigError: it is impossible in this version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # it was told when the run was started
        return TrainConfig.from_flat({name: value for name, value in values.items() if name in field_owners()})


def history_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a config.yaml's history, in order: values, and the last step in which they were in force."""
    entries = found if isinstance(found := values.get(HISTORY), list) else []
    whole = [each for each in entries if isinstance(each, dict) and isinstance(each.get(UNTIL), int)]
    return sorted(whole, key=lambda each: each[UNTIL])


def in_force(values: Mapping[str, Any], step: float = math.inf) -> dict[str, Any]:
    """The fields of a config.yaml as they were in a step (from 1), or as they are now; without the history."""
    found = {name: value for name, value in values.items() if name != HISTORY}
    for entry in reversed(history_of(values)):
        if entry[UNTIL] >= step:
            found |= {name: value for name, value in entry.items() if name in found}
    return found


def with_history(config: TrainConfig, past: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What config.yaml holds from a resume on.

    Args:
        config: in force from now on.
        past: what it held, see `read`.
        step: the steps done; what was noted of later ones is undone.
    """
    now = plain(config) | {"resume": False}
    entries, after = list[dict[str, Any]](), now
    for until in sorted({step, *(min(step, each[UNTIL]) for each in history_of(past))}, reverse=True):
        before = in_force(past, until)
        changes = _changes(before, after)
        entries += [{UNTIL: until, **{name: old for name, (old, _) in changes.items()}}] if changes else []
        after = before
    return now | ({HISTORY: entries[::-1]} if entries else {})


def told(values: Mapping[str, Any]) -> dict[int, str]:
    """Step -> what was changed after it, in words; from the values of a config.yaml."""
    steps = (entry[UNTIL] for entry in history_of(values))
    return {step: in_words(_changes(in_force(values, step), in_force(values, step + 1))) for step in steps}


SUMMED = (".safetensors", ".bin", ".json", ".model", ".txt")
"""The files of a folder that make a model what it is."""


def identity(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Field -> the name of a model or data, and the SHA-256 of its contents; "" where they are not on this machine."""
    given = config.flat()
    return {name: {"name": given[name], "sha256": _sum(given[name]) if given[name] else ""} for name in IDENTIFIED}


def _sum(name: str) -> str:
    own = {"builtin": lambda: base_model_folder(BaseModelConfig())}
    place, found = own[name]() if name in own else at_home(policy_folder(name)), hashlib.sha256()
    inside = sorted(place.iterdir()) if place.is_dir() and not has_own_prompts(name) else []
    files = [each for each in inside if each.suffix in SUMMED] or [each for each in (place,) if each.is_file()]
    for file in files:
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest() if files else ""


def _others(
    folder: Path, past: Mapping[str, Any], asked: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Field -> the model or data that a run has, and what is asked for, where the two are not the same."""
    try:
        noted = dict(json_of((folder / IDENTITY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a run of an older version
        noted = {}
    found: dict[str, tuple[str, str]] = {}
    for field, now in asked.items():
        was = {"name": past[field], "sha256": ""} | dict(noted.get(field) or {})
        compared = "sha256" if was["sha256"] and now["sha256"] else "name"
        if was[compared] != now[compared]:
            found[field] = (f"{was['name']} {was['sha256']}".strip(), f"{now['name']} {now['sha256']}".strip())
    return found
