"""From the command line of `klamp ablate` to a plan: one value of a flag is for all arms, several are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.ablation.clipping import clipping_plan
from klamp.ablation.plan import OWNED, Arm, Plan, crossed, folder_name, grid
from klamp.cli.ablate_file import PlanFile, read_plan_file, seeds_of
from klamp.cli.arguments import preset_values
from klamp.cli.config_file import read_file
from klamp.cli.fields import Field, fields_of, read_value
from klamp.cli.flags import every_flag, field_name, find_field, read_group, split_flags, unknown_key
from klamp.cli.options import TrainOptions
from klamp.config.kl import resolve_aliases
from klamp.errors import ConfigError, UnknownNameError, unknown_name
from klamp.training.config import TrainConfig, field_owners

STUDIES: Mapping[str, Callable[..., Plan]] = {"clipping": clipping_plan}
"""Name after `klamp ablate` -> the plan of a study: called with `base` and, where given, `seeds`."""


@dataclass(frozen=True, kw_only=True)
class AblateOptions(TrainOptions):
    """What is compared, how often, where, and with how many processes."""

    seeds: tuple[int, ...] = (3,)
    """One number: how many (3 is 0 1 2). Several: those seeds."""
    plan: str | None = None
    """YAML file with `base`, `sweep` or `arms`, and `seeds`."""
    output_dir: str | None = None
    """Folder of the ablation; None: runs/ablation-NAME-NNN, the one with this plan or the next free one."""
    workers: int | None = None
    """Processes at a time; None: one per core, or per GPU."""
    ray: str | None = None
    """Run on a Ray cluster: its address; without a value: one of this machine only."""
    cpus_per_run: float = 1.0
    """With --ray: CPUs of a run, and its threads."""
    gpus_per_run: float = 0.0
    """With --ray: GPUs of a run; a fraction shares one."""


RAY_HERE = "local"
DEFAULTS: Mapping[str, Any] = {"report_to": (), "keep_checkpoints": 1}
"""What an ablation sets otherwise than klamp train, where nobody asks for it: many runs need much room."""


@dataclass(frozen=True, kw_only=True)
class AblateRequest:
    """What a command line asks for."""

    plan: Plan
    """What to run."""
    options: AblateOptions
    """The command's own options."""
    argv: tuple[str, ...]
    """The command line itself."""


@dataclass(kw_only=True)
class _Given:
    """The flags, sorted by what they are."""

    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def parse_ablate(argv: Sequence[str]) -> AblateRequest:
    """The ablation that a command line describes.

    What stands further right wins: defaults < preset < --config < the plan's base < flags < what an arm sets. The file
    of a single run may be given to --config; its seed, output_dir and resume are left out.

    Raises:
        UnknownNameError: an unknown flag, key, preset, study or choice; names the nearest.
        ConfigError: a value that cannot be read, or that would be passed over in silence.
    """
    study, words = _study(argv)
    given = _read(words)
    options = AblateOptions(**given.options)
    file = PlanFile() if options.plan is None else read_plan_file(Path(options.plan))
    if study and options.plan:
        raise ConfigError(
            f"the study {study} is a plan of its own",
            got=f"--plan {options.plan}",
            why="one of the two would be passed over",
            fix=f"klamp ablate {study}, or klamp ablate --plan {options.plan}",
        )
    one = read_file(options.config) if options.config else {}
    base = {**{name: value for name, value in one.items() if name not in OWNED}, **file.base, **given.base}
    sweep = {name: values for name, values in file.sweep.items() if name not in given.base} | given.sweep
    base = {name: value for name, value in base.items() if name not in sweep}
    recipe = preset_values(base.pop("preset")) if base.get("preset") is not None else {}
    base.pop("preset", None)
    arms = _arms(file.arms, sweep, _Recipe(shared=recipe, fixed=frozenset(base.keys() | sweep.keys())))
    base = {**DEFAULTS, **recipe, **base}
    seeds = seeds_of(list(options.seeds), "--seeds") if "seeds" in given.options else file.seeds
    if study:
        plan = STUDIES[study](base=base, **({} if seeds is None else {"seeds": seeds}))
        plan = dataclasses.replace(plan, arms=crossed(plan.arms, arms)) if sweep else plan
    else:
        task = Path(str(base.get("task", "arithmetic"))).stem
        name = file.name or "-".join(sweep) or Path(options.plan or task).stem
        plan = Plan(name=folder_name(name), base=base, arms=arms, seeds=seeds or (0, 1, 2))
    _refuse_without_effect(given.base, plan.arms)
    return AblateRequest(plan=plan, options=options, argv=tuple(argv))


def _study(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The study named first, if there is one, and the flags."""
    if not argv or argv[0].startswith("-"):
        return "", argv
    if argv[0].endswith((".yaml", ".yml")):
        raise ConfigError("a word that belongs to no flag", got=argv[0], fix=f"klamp ablate --plan {argv[0]}")
    if argv[0] not in STUDIES:
        raise unknown_name("study", argv[0], STUDIES)
    return argv[0], argv[1:]


def _read(words: Sequence[str]) -> _Given:
    given, own = _Given(), {each.name: each for each in fields_of("", AblateOptions)}
    for flag, texts in split_flags(words):
        name = field_name(flag)
        if name in own and name != "preset":
            given.options[name] = _option(own[name], texts, flag)
            continue
        known = find_field(name)
        if known is not None and known.spec.nargs == 1 and len(texts) > 1:
            given.sweep[known.name] = _several(known, texts, flag)
            continue
        try:
            key, value = read_group(flag, texts)
        except UnknownNameError as error:
            if known is None and not name.startswith("no_"):
                flags = every_flag() | {f"--{each}" for each in own}
                raise unknown_key("flag", flag, flags, why="neither klamp ablate nor klamp train has it") from error
            raise
        given.base[key] = value
    for name in ("cpus_per_run", "gpus_per_run"):
        if name in given.options and given.options.get("ray") is None:
            why = "on this machine klamp counts cores and GPUs itself"
            raise ConfigError(
                f"--{name} needs --ray", got=given.options[name], why=why, fix="leave it out, or add --ray"
            )
    given.base = {**resolve_aliases(given.base, {*field_owners(), "preset"})}
    for name in given.base.keys() & given.sweep.keys():
        got = f"{given.base[name]!r} and {', '.join(map(repr, given.sweep[name]))}"
        raise ConfigError(f"{name} is given twice", got=got, why="under two of its names", fix="keep one")
    return given


def _option(option: Field, texts: list[str], flag: str) -> Any:
    if option.name == "ray" and not texts:
        return RAY_HERE
    value = read_value(option, ["True"] if option.is_switch and not texts else texts, shown=flag)
    if option.name == "workers" and value is not None and value < 1:
        raise ConfigError("--workers must be at least 1", got=value, fix="leave it out: one per core")
    return value


def _several(known: Field, texts: Sequence[str], flag: str) -> tuple[Any, ...]:
    """The values of a flag that is swept."""
    values = tuple(read_value(known, [text], shown=flag) for text in texts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ConfigError(f"{flag} has a value twice", got=repr(value), why="an arm is run once", fix="keep one")
    return values


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a recipe that an arm names has to look out for."""

    shared: Mapping[str, Any]
    """What the base's own recipe sets; it does not hold in arms with another one."""
    fixed: frozenset[str]
    """Fields that base or sweep set; they win over any recipe."""

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
    """Named arms, recipes and the grid of the other fields, each with each."""
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
