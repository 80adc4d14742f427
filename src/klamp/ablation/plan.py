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

from klamp.errors import ConfigError, without_credentials
from klamp.training.backends import check_backend
from klamp.training.config import TrainConfig
from klamp.training.folders import RUNS

KL_PROMPTS = 256
"""The default of `Plan.kl_prompts`."""
OWNED = ("seed", "output_dir", "resume")
"""Fields that the ablation sets itself."""


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


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    name: str
    """Also the name of its folder; unique in the plan."""
    arm: Arm
    seed: int
    config: TrainConfig
    kl_prompts: int


def grid(sweep: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """One arm for every combination of the values of some fields (and of `preset`); the last one varies fastest."""
    combinations = (dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values()))
    return tuple(
        Arm(name=" ".join(f"{name}={shown(value)}" for name, value in values.items()) or "base", values=values)
        for values in combinations
    )


def runs(plan: Plan) -> tuple[Run, ...]:
    """All runs of a plan with their checked configurations, seed by seed."""
    pairs = itertools.product(plan.seeds, plan.arms)
    every = tuple(run_of(arm, seed, _config(plan, arm, seed), plan.kl_prompts) for seed, arm in pairs)
    if twice := [name for name, count in Counter(run.name for run in every).items() if count > 1]:
        raise ConfigError(
            "an arm or a seed is repeated", got=twice[0], why="each run has its own folder", fix="keep one"
        )
    for one, other in itertools.combinations(every[: len(plan.arms)], 2):
        if one.config == other.config:
            raise ConfigError(
                f"the arms {one.arm.name!r} and {other.arm.name!r} are the same",
                why="the base sets the same values, or wins over the arms' values",
                fix="keep one of the arms, or remove their fields from the base",
            )
    return every


def run_of(arm: Arm, seed: int, config: TrainConfig, kl_prompts: int) -> Run:
    """The run of an arm with a seed."""
    name = f"{folder_name(arm.name)}_seed-{seed}"
    return Run(name=name, arm=arm, seed=seed, config=config, kl_prompts=kl_prompts)


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
    """The plan as plain data for YAML, as `klamp ablate --plan` reads it, without credentials of URLs."""

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: without_credentials(v) if isinstance(v, str) else v for name, v in lists.items()}

    arms = {arm.name: plain(arm.values) for arm in plan.arms}
    return {**vars(plan), "base": plain(plan.base), "arms": arms, "seeds": list(plan.seeds)}


def _config(plan: Plan, arm: Arm, seed: int) -> TrainConfig:
    """The checked configuration of a run; an error has the arm as its note."""
    try:
        for name in {*plan.base, *arm.values} & set(OWNED):
            raise ConfigError(f"it sets {name}", why="the ablation sets it", fix="use --seeds and --output_dir")
        config = TrainConfig.from_flat({**plan.base, **arm.values, "seed": seed})
        check_backend(config)
        if config.run.backend != "local":
            raise ConfigError(
                "an ablation trains in klamp's own loop only",
                got=f"backend={config.run.backend!r}",
                why="the other trainers keep their checkpoints and results in forms of their own",
                fix="leave backend out, or run the arms one by one with klamp train",
            )
    except ConfigError as error:
        error.add_note(f"in the arm {arm.name!r}")
        raise
    return config
