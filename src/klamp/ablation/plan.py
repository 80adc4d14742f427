"""The plan of an ablation: arms (what differs) times seeds (how often); plain data, nothing is loaded."""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.config.kl import resolve_aliases
from klamp.config.teacher import ALL_ALIASES
from klamp.errors import ConfigError, KlampError, RunFolderError, without_credentials
from klamp.tasks.files import yaml_of
from klamp.tasks.paths import with_end
from klamp.training.backends import check_backend
from klamp.training.config import Backend, TrainConfig, field_owners
from klamp.training.folders import RUNS

KL_PROMPTS = 256
"""Held-out prompts of the trained skill that a policy's KL is measured on, where there are as many."""

PLAN = "plan.yaml"
"""The file of the plan in an ablation's folder; a worker reads there what its run is."""

LONGEST_NAME = 100
"""Characters of an arm that a folder's name keeps."""

MEASURED: tuple[Backend, ...] = ("local", "trl", "verl")
"""The backends whose runs can be measured afterwards: their checkpoints hold a model as it is loaded."""

OWNED: Mapping[str, str] = {
    "seed": "the plan's seeds: --seeds 3, or `seeds: [0, 1, 2]` in the plan",
    "output_dir": "the folder of the ablation: --output_dir FOLDER",
    "resume": "the same command once more: it continues what is not done",
}
"""Fields that the ablation sets itself -> what to use instead."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant that is compared with the others: a name, and the fields that it sets."""

    name: str
    """The name in the table: "beta=0.01 kl_estimator=k1", or as the plan names it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value; they take the place of the values in the plan's base."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an ablation compares: a common base, arms, and seeds; where it runs is not part of the plan."""

    name: str = "ablation"
    """A short name, for the default folder and for headings."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value that all arms share; what is missing keeps its default."""
    arms: tuple[Arm, ...] = (Arm(name="base"),)
    """The arms that are compared."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that every arm is run with."""
    kl_prompts: int = KL_PROMPTS
    """Held-out prompts of the trained skill, at most, that a policy's KL is measured on."""

    def __post_init__(self) -> None:
        _refuse_twice("arm", [arm.name for arm in self.arms])
        _refuse_twice("seed", self.seeds)
        for kind, count in (("arms", len(self.arms)), ("seeds", len(self.seeds))):
            if not count:
                raise ConfigError(f"an ablation without {kind}", why="there is nothing to run", fix="name at least one")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    name: str
    """The name of the run and of its folder; unique in the plan."""
    arm: Arm
    """The arm that it belongs to."""
    seed: int
    """The seed of the run."""
    config: TrainConfig
    """Its configuration; whoever runs it sets `output_dir`."""
    kl_prompts: int = KL_PROMPTS
    """See `Plan.kl_prompts`."""


def grid(sweep: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """One arm for every combination of the values of some fields; the last field varies fastest.

    Args:
        sweep: field -> its values.

    Raises:
        UnknownNameError: no such field; names the nearest.
        ConfigError: a field without values, or with one value twice.
    """
    fields = resolve_aliases(sweep, set(field_owners()), ALL_ALIASES)
    for name, values in fields.items():
        if not values:
            raise ConfigError(f"{name} is swept over nothing", got="no value", fix=f"give values, or leave {name} out")
        _refuse_twice(f"value of {name}", [shown(value) for value in values])
    combinations = (dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values()))
    return tuple(
        Arm(name=" ".join(f"{name}={shown(value)}" for name, value in values.items()) or "base", values=values)
        for values in combinations
    )


def crossed(arms: Sequence[Arm], others: Sequence[Arm]) -> tuple[Arm, ...]:
    """One arm for every pair of an arm of the first kind and one of the second.

    Raises:
        ConfigError: both set the same field.
    """
    found: list[Arm] = []
    for one, other in itertools.product(arms, others):
        both = sorted(one.values.keys() & other.values.keys())
        if both:
            raise ConfigError(
                f"the arm {one.name!r} sets {both[0]}, which is swept",
                got=f"{shown(one.values[both[0]])} and {shown(other.values[both[0]])}",
                why="one of the two would be passed over in silence",
                fix=f"take {both[0]} out of the arm, or out of the sweep",
            )
        found.append(Arm(name=f"{one.name} {other.name}", values={**one.values, **other.values}))
    return tuple(found)


def runs(plan: Plan) -> tuple[Run, ...]:
    """All runs of a plan with their checked configurations, seed by seed: early results then tell of every arm.

    Raises:
        ConfigError: a configuration that is refused, with the arm's name; a field that the ablation sets itself; two
            arms that are the same.
    """
    base = _known(plan.base, "the base of the plan")
    found = [
        Run(
            name=f"{folder_name(arm.name)}_seed-{seed}",
            arm=arm,
            seed=seed,
            config=_config(base, arm, seed),
            kl_prompts=plan.kl_prompts,
        )
        for seed in plan.seeds
        for arm in plan.arms
    ]
    _refuse_twice("folder name", [run.name for run in found], fix="give the arms names that differ in letters")
    _refuse_same(found[: len(plan.arms)])
    return tuple(found)


def run_folder(folder: Path, run: Run) -> Path:
    """The folder that a run writes into.

    Args:
        folder: of the ablation.
        run: one of its runs.
    """
    return folder / RUNS / run.name


def folder_name(name: str) -> str:
    """An arm's name made into the name of a folder: "beta=0.01 kl_estimator=k1" -> "beta-0.01_kl_estimator-k1".

    Where letters are lost, a checksum of the name follows, so that different arms keep different folders.
    """
    plain = re.sub(r"\s+", "_", name.strip()).replace("=", "-")
    safe = re.sub(r"[^\w.+-]", "-", plain, flags=re.ASCII).strip("-._")[:LONGEST_NAME]
    return safe if safe and safe == plain else f"{safe}-{zlib.crc32(name.encode()):08x}".lstrip("-")


def shown(value: Any) -> str:
    """A value as it is written in an arm's name."""
    if isinstance(value, float):
        text = f"{value:g}"
        return text if float(text) == value else repr(value)
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value)) or "none"
    return without_credentials(str(value))


def plain_plan(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for YAML and JSON, without credentials of URLs; `read_plan` reads it back."""
    return {
        "name": plan.name,
        "base": _plain(plan.base),
        "arms": {arm.name: _plain(arm.values) for arm in plan.arms},
        "seeds": list(plan.seeds),
        "kl_prompts": plan.kl_prompts,
    }


def read_plan(folder: Path) -> Plan:
    """The plan that a folder was made with.

    Raises:
        RunFolderError: its file is damaged, or this version of klamp refuses what it says.
    """
    file = folder / PLAN
    try:
        content = yaml_of(with_end(file).read_text(encoding="utf-8"))
        plan = Plan(
            name=str(content["name"]),
            base=_tuples(content["base"]),
            arms=tuple(Arm(name=str(name), values=_tuples(values)) for name, values in content["arms"].items()),
            seeds=tuple(content["seeds"]),
            kl_prompts=content.get("kl_prompts", KL_PROMPTS),
        )
        runs(plan)
        return plan
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunFolderError(
            "the plan in the ablation's folder cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="choose another --output_dir",
        ) from error


def sees(folder: Path, run: Run) -> bool:
    """Whether the plan in an ablation's folder has this run; False where it cannot be read.

    Args:
        folder: of the ablation, as it is named on the machine that started it.
        run: one of its runs.
    """
    with suppress(OSError, RunFolderError):
        return run in runs(read_plan(folder))
    return False


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
    own = _known(arm.values, f"the arm {arm.name!r}")
    try:
        config = TrainConfig.from_flat({**base, **own, "seed": seed})
        check_backend(config)
    except ConfigError as error:
        raise named(error, f"the arm {arm.name!r}") from error
    check_measured(config, f"in the arm {arm.name!r}")
    return config


def check_measured(config: TrainConfig, where: str) -> None:
    """Refuse a run that cannot be measured once it is over.

    Args:
        config: of the run.
        where: whose it is, for the message: "in the arm 'beta=0.1'".

    Raises:
        ConfigError: its checkpoints hold no model as it is loaded.
    """
    if config.run.backend == "verl" and config.model.lora_r:
        raise ConfigError(
            "an ablation cannot measure verl's adapters",
            got=f"backend='verl', lora_r={config.model.lora_r} {where}",
            why="verl keeps an adapter in shards, and rounds it to bfloat16 when it puts them together",
            fix="leave lora_r out, or set backend to trl or local",
        )
    if config.run.backend not in MEASURED:
        raise ConfigError(
            "an ablation runs on this machine or on a Ray cluster",
            got=f"backend={config.run.backend!r} {where}",
            why="it measures the exact KL over the whole vocabulary, on checkpoints that hold a model as it is loaded",
            fix=f"leave backend out, or run the arms one by one with klamp train --backend {config.run.backend}",
        )


def named(error: KlampError, where: str) -> KlampError:
    """The same error, with the name of the arm that it belongs to.

    Args:
        error: what was raised.
        where: "the arm 'beta=0.1'".
    """
    return type(error)(f"{where}: {error.what}", got=error.got, why=error.why, fix=error.fix)


def _refuse_twice(kind: str, names: Sequence[Any], *, fix: str = "keep one") -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"a {kind} stands twice", got=twice[0], why="each combination is run once, under its own name", fix=fix
        )


def _refuse_same(of_one_seed: Sequence[Run]) -> None:
    """Refuse two arms that are the same configuration."""
    for i, run in enumerate(of_one_seed):
        for other in of_one_seed[:i]:
            if run.config == other.config:
                raise ConfigError(
                    f"the arms {other.arm.name!r} and {run.arm.name!r} are the same",
                    got=", ".join(f"{name}={shown(value)}" for name, value in run.arm.values.items()) or "no values",
                    why="what they set is what the base sets already, or gives way to it",
                    fix="keep one of them, or take the fields that they should set out of the base",
                )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: without_credentials(value)
        if isinstance(value, str)
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in values.items()
    }


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
