"""The plan of an ablation: arms (what differs) times seeds (how often), or runs that exist; nothing is loaded."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from klamp.errors import ConfigError, DataError, without_credentials
from klamp.lab.backends import check_backend
from klamp.lab.config import WATCHING, TrainConfig
from klamp.names import RUNS

KL_PROMPTS = 256  # the default of `Plan.kl_prompts`
OWNED = ("seed", "output_dir", "resume")  # fields that the ablation sets itself
NO_VARIANT = (*OWNED, *WATCHING, "exact_kl_completions", "cpu")
"""Fields that may differ between runs of one variant."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant: a name, and the fields that it sets."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A common base, arms, and seeds."""

    name: str = "ablation"
    base: Mapping[str, Any] = field(default_factory=dict)  # field -> value of all arms; an arm's own value replaces it
    arms: tuple[Arm, ...] = (Arm(name="base"),)  # the arms that are compared; the first one is the control
    seeds: tuple[int, ...] = (0, 1, 2)
    kl_prompts: int = KL_PROMPTS  # held-out prompts of the trained skill, at most, on which a policy's KL is measured


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    name: str  # also the name of its folder; unique in the plan
    arm: Arm
    seed: int
    config: TrainConfig
    kl_prompts: int


def grid(sweep: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """One arm for every combination of the values of some fields (and of `preset`); the last one varies fastest."""
    return tuple(_arm(dict(zip(sweep, values, strict=True))) for values in itertools.product(*sweep.values()))


def _arm(values: Mapping[str, Any]) -> Arm:
    return Arm(name=" ".join(f"{name}={shown(value)}" for name, value in values.items()) or "base", values=values)


def runs(plan: Plan) -> tuple[Run, ...]:
    """All runs of a plan with their checked configurations, seed by seed."""
    pairs = itertools.product(plan.seeds, plan.arms)
    every = tuple(run_of(arm, seed, _config(plan, arm, seed), plan.kl_prompts) for seed, arm in pairs)
    if repeated := [name for name, count in Counter(run.name for run in every).items() if count > 1]:
        raise ConfigError("an arm or a seed is repeated", got=repeated[0], why="each has a folder", fix="keep one")
    for one, other in itertools.combinations(every[: len(plan.arms)], 2):
        if one.config == other.config:
            what = f"the arms {one.arm.name!r} and {other.arm.name!r} are equal"
            fix = "keep one of the arms, or remove their fields from the base"
            raise ConfigError(what, why="the base sets the same values, or wins over theirs", fix=fix)
    return every


def run_of(arm: Arm, seed: int, config: TrainConfig, kl_prompts: int) -> Run:
    """The run of an arm with a seed."""
    name = f"{folder_name(arm.name)}_seed-{seed}"
    return Run(name=name, arm=arm, seed=seed, config=config, kl_prompts=kl_prompts)


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in the folder of the ablation."""
    return folder / RUNS / run.name


def folder_name(name: str) -> str:
    """An arm's name as a folder's: "beta=0.01 kl=k1" -> "beta-0.01_kl-k1"; if letters are lost, with a checksum."""
    plain = re.sub(r"\s+", "_", name.strip()).replace("=", "-")
    safe = re.sub(r"[^\w.+-]", "-", plain, flags=re.ASCII).strip("-._")[:100]
    return safe if safe and safe == plain else f"{safe}-{zlib.crc32(name.encode()):08x}".lstrip("-")


def shown(value: Any) -> str:
    """A value as text in an arm's name."""
    if isinstance(value, float):
        text = f"{value:g}"
        return text if float(text) == value else repr(value)
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value)) or "none"
    return without_credentials(str(value))


def plan_text(plan: Plan) -> str:
    """The plan as YAML, as `klamp ablate --plan` reads it, without credentials of URLs."""
    plain = json.loads(json.dumps({**vars(plan), "arms": {arm.name: arm.values for arm in plan.arms}}))
    return without_credentials(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _config(plan: Plan, arm: Arm, seed: int) -> TrainConfig:
    """The checked configuration of a run; an error has the arm as its note."""
    try:
        values = {**plan.base, **arm.values}
        for name in values.keys() & OWNED:
            raise ConfigError(f"it sets {name}", why="the ablation sets it", fix="use --seeds and --output_dir")
        config = TrainConfig.from_flat(values | {"seed": seed})
        check_backend(config)
        if config.run.backend != "local":
            fix = "leave backend out, or run the arms one by one with klamp train"
            why = "the other trainers keep their checkpoints in forms of their own"
            raise ConfigError("an ablation trains in klamp's own loop only", got=config.run.backend, why=why, fix=fix)
    except ConfigError as error:
        error.add_note(f"in the arm {arm.name!r}")
        raise
    return config


def as_runs(configs: Sequence[tuple[Path, TrainConfig]], *, kl_prompts: int = KL_PROMPTS) -> dict[Path, Run]:
    """The runs of some folders, of one task and each of its own; the fields in which they differ name their arms."""
    first, rows = configs[0], [config.flat() for _, config in configs]
    names = [name for name in rows[0] if name not in NO_VARIANT and len({repr(values[name]) for values in rows}) > 1]
    for name in (name for name in names if hasattr(first[1].task, name) and name != "train_size"):  # of no held-out row
        values = {path: config.flat()[name] for path, config in configs}
        other, value = next((path, x) for path, x in values.items() if repr(x) != repr(rows[0][name]))
        got = f"{name} is {shown(rows[0][name])!r} in {first[0]} and {shown(value)!r} in {other}"
        fix = "name runs of one task, or score each with klamp evaluate --checkpoint FOLDER --task NAME"
        raise DataError("these runs had different tasks", got=got, why="their scores are of other prompts", fix=fix)
    compared: dict[Path, Run] = {}
    for (folder, config), values in zip(configs, rows, strict=True):
        run = run_of(_arm({name: values[name] for name in names}), config.run.seed, config, kl_prompts)
        if other := next((path for path, earlier in compared.items() if earlier.name == run.name), None):
            what, why = "two runs are the same variant with the same seed", "their numbers would count twice"
            raise DataError(what, got=f"{other} and {folder}, both {run.name}", why=why, fix="name one of them")
        compared[folder] = run
    return compared
