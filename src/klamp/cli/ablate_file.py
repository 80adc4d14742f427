"""From a plan's YAML file to its parts: base, sweep, arms, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.ablation.plan import Arm
from klamp.cli.config_file import load_yaml, read_entries, read_entry
from klamp.cli.flags import field_name, unknown_key
from klamp.cli.train_fields import fields_by_any_name
from klamp.config import ALIASES
from klamp.errors import ConfigError

KEYS = ("name", "base", "sweep", "arms", "seeds", "kl_prompts")
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan's file holds."""

    name: str = ""
    """The name of the plan."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value for all arms."""
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field -> values; every combination is an arm."""
    arms: tuple[Arm, ...] = ()
    """Name of an arm -> its fields and values."""
    seeds: tuple[int, ...] | None = None
    """Seeds of every arm; None: the file does not say."""
    kl_prompts: int | None = None
    """Held-out prompts per skill that the KL is measured on; None: the file does not say."""


def read_plan_file(path: Path) -> PlanFile:
    """The plan in a YAML file.

        name: beta                     # of the folder
        base: {max_steps: 60}          # any field of klamp train, flat or under its section; also preset
        sweep: {beta: [0, 0.01]}       # every combination is an arm
        arms: {no KL: {beta: 0}}       # or arms by name; with a sweep, each arm with each combination
        seeds: 3                       # how many, or a list of them
        kl_prompts: 64                 # held-out prompts per skill that the KL is measured on; 256 if left out

    Raises:
        UnknownNameError: an unknown key or choice; names the nearest.
        ConfigError: no such file, no valid YAML, nothing in it, or a value that cannot be read.
    """
    content = load_yaml(path)
    if not content:
        raise ConfigError(
            f"the plan in {path} is empty",
            why="an ablation of it would run the defaults and nothing beside them",
            fix="sweep: {beta: [0, 0.01]}, or any of " + ", ".join(KEYS),
        )
    for key in content:
        if key not in KEYS:
            raise _unknown(str(key), path)
    arms, sweep = (_mapping(content.get(part), part, path) for part in ("arms", "sweep"))
    return PlanFile(
        name=str(content.get("name") or ""),
        base=read_entries(_mapping(content.get("base"), "base", path), path),
        sweep={
            ALIASES.get(name, name): _values(name, values, path)
            for name, values in ((field_name(str(key)), values) for key, values in sweep.items())
        },
        arms=tuple(
            Arm(name=str(name), values=read_entries(_mapping(values, f"the arm {name}", path), path))
            for name, values in arms.items()
        ),
        seeds=None if content.get("seeds") is None else seeds_of(content["seeds"], f"seeds in {path}"),
        kl_prompts=_count("kl_prompts", content.get("kl_prompts"), path),
    )


def seeds_of(value: object, shown: str) -> tuple[int, ...]:
    """The seeds: from a number, that many starting at 0; from a list, the seeds in it.

    Args:
        value: what was given; a list of one number counts as that number on the command line, not in a file.
        shown: where it stands, for the message.

    Raises:
        ConfigError: it is neither, or not at least one seed.
    """
    count = value[0] if shown == "--seeds" and isinstance(value, list) and len(value) == 1 else value
    if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MOST_SEEDS:
        return tuple(range(count))
    seeds = value if isinstance(value, list) and count is value else []
    if not seeds or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds):
        raise ConfigError(
            f"{shown} cannot be read",
            got=repr(value),
            why="it takes how many seeds there are, or the seeds, whole numbers of at least 0",
            fix="3 stands for the seeds 0, 1 and 2",
        )
    return tuple(seeds)


def _count(name: str, value: object, path: Path) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ConfigError(f"{name} in {path} cannot be read", got=repr(value), why="it is a whole number of at least 1")


def _values(name: str, values: object, path: Path) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ConfigError(
            f"sweep of {name} in {path} is no list",
            got=repr(values),
            why="a field is swept over several values",
            fix=f"{name}: [{values}, ...], or move it to base",
        )
    return tuple(read_entry(name, value, path) for value in values)


def _mapping(value: object, what: str, path: Path) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{what} in {path} holds no names",
            got=repr(value),
            why="each line says which field has which value",
            fix="one `name: value` per line, for example `beta: 0.01`",
        )
    return value


def _unknown(key: str, path: Path) -> Exception:
    if key in fields_by_any_name():
        return ConfigError(
            f"{key} stands by itself in {path}",
            got=key,
            why=f"a plan has the keys {', '.join(KEYS)}",
            fix=f"put it under base (for all arms): base: {{{key}: ...}}",
        )
    why = f"a plan has the keys {', '.join(KEYS)}"
    return unknown_key(f"key in {path}", key, KEYS, why=why, command="klamp ablate")
