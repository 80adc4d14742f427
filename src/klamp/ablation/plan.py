"""The plan of an ablation: arms (what differs) times seeds (how often); plain data, nothing is loaded."""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.config.kl import resolve_aliases
from klamp.config.teacher import ALL_ALIASES
from klamp.errors import ConfigError, KlampError, RunFolderError, without_credentials
from klamp.files import yaml_of
from klamp.tasks.paths import with_end
from klamp.training.backends import check_backend
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import RUNS

KL_PROMPTS = 256
"""The default of `Plan.kl_prompts`."""
PLAN = "plan.yaml"
"""The file of the plan in an ablation's folder."""
"""The backends with checkpoints that can be loaded as models."""
OWNED: Mapping[str, str] = {
    "seed": "the plan's seeds: --seeds 3, or `seeds: [0, 1, 2]` in the plan",
    "output_dir": "the folder of the ablation: --output_dir FOLDER",
    "resume": "the same command once more: it continues what is not done",
}
"""Fields that the ablation sets itself -> what to use instead."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant: a name, and the fields that it sets."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A common base, arms, and seeds."""

    name: str = "ablation"
    base: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value of all arms; an arm's own value replaces it."""
    arms: tuple[Arm, ...] = (Arm(name="base"),)
    """The arms that are compared; the first one is the control."""
    seeds: tuple[int, ...] = (0, 1, 2)
    kl_prompts: int = KL_PROMPTS
    """Held-out prompts of the trained skill, at most, on which a policy's KL is measured."""

    def __post_init__(self) -> None:
        _refuse_twice("arm", [arm.name for arm in self.arms])
        _refuse_twice("seed", self.seeds)
        if not (self.arms and self.seeds):
            raise ConfigError(
                "an ablation without arms or seeds", why="there is nothing to run", fix="name at least one"
            )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    name: str
    """Also the name of its folder; unique in the plan."""
    arm: Arm
    seed: int
    config: TrainConfig
    kl_prompts: int = KL_PROMPTS


def grid(sweep: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """One arm for every combination of the values of some fields (and of `preset`); the last one varies fastest."""
    fields = resolve_aliases(sweep, {*field_owners(), "preset"}, ALL_ALIASES)
    for name, values in fields.items():
        if not values:
            raise ConfigError(f"{name} is swept over nothing", got="no value", fix=f"give values, or leave {name} out")
        _refuse_twice(f"value of {name}", [shown(value) for value in values])
    combinations = (dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values()))
    return tuple(
        Arm(name=" ".join(f"{name}={shown(value)}" for name, value in values.items()) or "base", values=values)
        for values in combinations
    )


def runs(plan: Plan) -> tuple[Run, ...]:
    """All runs of a plan with their checked configurations, seed by seed; errors name the arm."""
    base = _known(plan.base, "the base of the plan")
    every = tuple(
        Run(
            name=f"{folder_name(arm.name)}_seed-{seed}",
            arm=arm,
            seed=seed,
            config=_config(base, arm, seed),
            kl_prompts=plan.kl_prompts,
        )
        for seed in plan.seeds
        for arm in plan.arms
    )
    _refuse_twice("folder name", [run.name for run in every], fix="give the arms names that differ in letters")
    for one, other in itertools.combinations(every[: len(plan.arms)], 2):
        if one.config == other.config:
            raise ConfigError(
                f"the arms {one.arm.name!r} and {other.arm.name!r} are the same",
                got=", ".join(f"{name}={shown(value)}" for name, value in other.arm.values.items()) or "no values",
                why="the base sets the same values, or wins over the arms' values",
                fix="keep one of the arms, or remove their fields from the base",
            )
    return every


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in the folder of the ablation."""
    return folder / RUNS / run.name


def folder_name(name: str) -> str:
    """An arm's name made into the name of a folder: "beta=0.01 kl_estimator=k1" -> "beta-0.01_kl_estimator-k1".

    If letters are lost, a checksum of the name follows, so that different arms have different folders.
    """
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


def plain_plan(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for YAML, without credentials of URLs; `read_plan` reads it back."""

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: without_credentials(v) if isinstance(v, str) else v for name, v in lists.items()}

    arms = {arm.name: plain(arm.values) for arm in plan.arms}
    return {**vars(plan), "base": plain(plan.base), "arms": arms, "seeds": list(plan.seeds)}


def read_plan(folder: Path) -> Plan:
    """The plan in an ablation's folder; a RunFolderError if its file is damaged, or has refused content."""

    def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    try:
        content = yaml_of(with_end(folder / PLAN).read_text(encoding="utf-8"))
        arms = tuple(Arm(name=str(name), values=tuples(values)) for name, values in content["arms"].items())
        plan = Plan(**{**tuples(content), "name": str(content["name"]), "base": tuples(content["base"]), "arms": arms})
        runs(plan)
        return plan
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunFolderError(
            "the plan in the ablation's folder cannot be read",
            got=str(folder / PLAN),
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="choose another --output_dir",
        ) from error


def check_measured(config: TrainConfig, where: str) -> None:
    """Refuse a run ("in the arm 'beta=0.1'") whose checkpoints hold no model that can be loaded."""
    if config.run.backend == "verl" and config.model.lora_r:
        raise ConfigError(
            "verl's adapters cannot be measured",
            got=f"backend='verl', lora_r={config.model.lora_r} {where}",
            why="verl keeps them in shards, and the exact KL is measured on checkpoints that can be loaded as models",
            fix="train all weights, or set backend to trl or local",
        )


def check_followed(config: TrainConfig, where: str) -> None:
    """Refuse a run that another trainer carries out."""
    if config.run.backend != "local":
        raise ConfigError(
            "an ablation trains by klamp's own loop",
            got=f"backend={config.run.backend!r} {where}",
            why="it follows its runs step by step, and those of another trainer are that trainer's own",
            fix="set backend to local, or run the arms one by one with klamp train and compare them with klamp report",
        )


def named(error: KlampError, where: str) -> KlampError:
    """The same error, with the part of the plan that it belongs to ("the arm 'beta=0.1'")."""
    return type(error)(f"{where}: {error.what}", got=error.got, why=error.why, fix=error.fix)


def _known(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values under their proper names; refuses fields that the ablation sets itself."""
    try:
        resolved = resolve_aliases(values, set(field_owners()), ALL_ALIASES)
    except ConfigError as error:
        raise named(error, where) from error
    for name in resolved.keys() & OWNED.keys():
        raise ConfigError(
            f"{where} sets {name}", got=shown(resolved[name]), why="the ablation sets it", fix=f"use {OWNED[name]}"
        )
    return resolved


def _config(base: Mapping[str, Any], arm: Arm, seed: int) -> TrainConfig:
    where = f"the arm {arm.name!r}"
    own = _known(arm.values, where)
    try:
        config = TrainConfig.from_flat({**base, **own, "seed": seed})
        check_backend(config)
    except ConfigError as error:
        raise named(error, where) from error
    check_followed(config, f"in {where}")
    return config


def _refuse_twice(kind: str, names: Sequence[Any], *, fix: str = "keep one") -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"a {kind} stands twice", got=twice[0], why="each combination is run once, under its own name", fix=fix
        )
