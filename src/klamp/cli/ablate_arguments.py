"""From the command line of `klamp ablate` to a plan: one value of a flag is for all arms, several are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.ablation.plan import KL_PROMPTS, OWNED, Arm, Plan, crossed, folder_name, grid
from klamp.cli.ablate_file import PlanFile, read_plan_file, seeds_of
from klamp.cli.ablate_runs import check_alone
from klamp.cli.arguments import preset_values
from klamp.cli.config_file import read_file
from klamp.cli.fields import Field, fields_of, read_value
from klamp.cli.flags import field_name, read_own
from klamp.cli.options import AblateOptions
from klamp.cli.train_fields import every_flag, fields_by_any_name, read_train_flag
from klamp.config.kl import resolve_aliases
from klamp.errors import ConfigError
from klamp.training.config import TrainConfig, field_owners

DEFAULTS: Mapping[str, Any] = {"report_to": (), "keep_checkpoints": 1}
"""Field -> an ablation's default where it is not that of `klamp train`: many runs need much room on disk."""


@dataclass(frozen=True, kw_only=True)
class AblateRequest:
    """What a command line of `klamp ablate` asks for."""

    plan: Plan
    """The runs to make."""
    options: AblateOptions
    """The options of `klamp ablate` itself."""
    argv: tuple[str, ...]
    """The words of the command line, as they were typed."""


@dataclass(kw_only=True)
class _Given:
    """The flags of a command line, sorted: for all arms, swept, or recipes."""

    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def parse_ablate(argv: Sequence[str]) -> AblateRequest:
    """The ablation that a command line describes.

    What stands further right wins: defaults < preset < --config < the plan's base < flags < what an arm sets. The file
    of a single run may be given to --config; its seed, output_dir and resume are left out.

    Raises:
        UnknownNameError: an unknown flag, key, preset or choice; names the nearest.
        ConfigError: a value that cannot be read, or that would be passed over in silence.
    """
    given = _read(argv)
    options = AblateOptions(**given.options)
    if options.runs:
        check_alone([*given.options, *given.base, *given.sweep])
    file = PlanFile() if options.plan is None else read_plan_file(Path(options.plan))
    one = read_file(options.config) if options.config else {}
    base = {**{name: value for name, value in one.items() if name not in OWNED}, **file.base, **given.base}
    sweep = {name: values for name, values in file.sweep.items() if name not in given.base} | given.sweep
    base = {name: value for name, value in base.items() if name not in sweep}
    recipe = preset_values(base.pop("preset")) if base.get("preset") is not None else {}
    base.pop("preset", None)
    arms = _arms(file.arms, sweep, _Recipe(shared=recipe, fixed=frozenset(base.keys() | sweep.keys())))
    base = {**DEFAULTS, **recipe, **base}
    seeds = seeds_of(list(options.seeds), "--seeds") if "seeds" in given.options else file.seeds
    task = Path(str(base.get("task", "arithmetic"))).stem
    name = file.name or "-".join(sweep) or Path(options.plan or task).stem
    kl_prompts = options.kl_prompts or file.kl_prompts or KL_PROMPTS
    plan = Plan(name=folder_name(name), base=base, arms=arms, seeds=seeds or (0, 1, 2), kl_prompts=kl_prompts)
    _refuse_without_effect(given.base, plan.arms)
    return AblateRequest(plan=plan, options=options, argv=tuple(argv))


def _read(argv: Sequence[str]) -> _Given:
    own = {name: field for name, field in fields_of(AblateOptions).items() if name != "preset"}  # that may be compared
    options, others = read_own(own, argv, command="klamp ablate", others=every_flag())
    given = _Given(options=options)
    for flag, texts in others:
        known = fields_by_any_name().get(field_name(flag))
        if known is not None and known.count == 1 and len(texts) > 1:
            given.sweep[known.name] = _several(known, texts, flag)
        else:
            name, value = read_train_flag(flag, texts)
            given.base[name] = value
    for name in ("cpus_per_run", "gpus_per_run"):
        if name in options and options.get("ray") is None:
            why = "on this machine klamp counts cores and GPUs itself"
            raise ConfigError(f"--{name} needs --ray", got=options[name], why=why, fix="leave it out, or add --ray")
    given.base = {**resolve_aliases(given.base, {*field_owners(), "preset"})}
    for name in given.base.keys() & given.sweep.keys():
        got = f"{given.base[name]!r} and {', '.join(map(repr, given.sweep[name]))}"
        raise ConfigError(f"{name} is given twice", got=got, why="under two of its names", fix="keep one")
    return given


def _several(known: Field, texts: Sequence[str], flag: str) -> tuple[Any, ...]:
    """The values of a flag that is swept."""
    values = tuple(read_value(known, [text], shown=flag) for text in texts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ConfigError(f"{flag} has a value twice", got=repr(value), why="an arm is run once", fix="keep one")
    return values


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """How the recipe (preset) of an arm is combined with the fields that base and sweep set."""

    shared: Mapping[str, Any]
    """Fields that the recipe of the base sets; arms with another recipe do without them."""
    fixed: frozenset[str]
    """Fields that base or sweep set; each wins over the same field of any recipe."""

    def expanded(self, arm: Arm) -> Arm:
        """The arm with the fields of its recipe in the place of the recipe's name."""
        values = dict(arm.values)
        preset = values.pop("preset", None)
        if preset is None:
            return Arm(name=arm.name, values=values)
        defaults = TrainConfig().flat()
        recipe = {name: defaults[name] for name in self.shared} | preset_values(preset)
        kept = {name: value for name, value in recipe.items() if name not in self.fixed}
        return Arm(name=arm.name, values=kept | values)


def _arms(named: Sequence[Arm], sweep: Mapping[str, Sequence[Any]], recipe: _Recipe) -> tuple[Arm, ...]:
    """All arms: each named arm or recipe with each combination of the other swept fields."""
    others = {name: values for name, values in sweep.items() if name != "preset"}
    recipes = (Arm(name=f"preset={name}", values={"preset": name}) for name in sweep.get("preset", ()))
    parts = [tuple(map(recipe.expanded, part)) for part in (named, tuple(recipes)) if part]
    if others or not parts:
        parts.append(grid(others))
    arms = parts[0]
    for more in parts[1:]:
        arms = crossed(arms, more)
    return arms


def _refuse_without_effect(flags: Mapping[str, Any], arms: Sequence[Arm]) -> None:
    for name, value in flags.items():
        if arms and all(name in arm.values for arm in arms):
            raise ConfigError(
                f"--{name} has no effect",
                got=f"--{name} {value}",
                why="every arm of the plan sets it",
                fix=f"leave --{name} out, or change the arms",
            )
