"""From the command line of `klamp ablate` and a plan's YAML file to a plan: several values of a flag are compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.ablation.plan import KL_PROMPTS, OWNED, Arm, Plan, folder_name, grid
from klamp.cli.arguments import load_yaml, mapping_of, preset_values, read_entries, read_entry, read_file
from klamp.cli.flags import by_any_name, field_name, fields_of, split_argv, train_fields, unknown_key
from klamp.cli.options import AblateOptions
from klamp.config.kl import resolve_aliases
from klamp.config.teacher import ALL_ALIASES
from klamp.errors import ConfigError
from klamp.tasks.paths import at_home
from klamp.training.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {"report_to": (), "keep_checkpoints": 1}
"""Field -> an ablation's default where it is not that of `klamp train`: many runs need much room on disk."""

BESIDE = ("runs", "output_dir", "kl_prompts")
"""Options of `klamp ablate` that have a meaning for runs that are there already."""


def parse_ablate(argv: Sequence[str]) -> tuple[Plan, AblateOptions]:
    """The ablation that a command line describes, and the options of `klamp ablate` itself.

    What stands further right wins: defaults < preset < --config < the plan's base < flags < what an arm sets. The file
    of a single run may be given to --config; its seed, output_dir and resume are left out.

    Raises:
        UnknownNameError: an unknown flag, key, preset or choice; names the nearest.
        ConfigError: a value that cannot be read, or that would be passed over in silence.
    """
    own, flags, swept = _read(argv)
    options = AblateOptions(**own)
    if options.runs and (left := [name for name in (*own, *flags, *swept) if name not in BESIDE]):
        raise ConfigError(
            f"--{left[0]} has no meaning with --runs",
            got=", ".join(f"--{name}" for name in left),
            why="the runs are there: they are measured and compared as they were made",
            fix="leave it out, or leave --runs out and let klamp ablate train",
        )
    file = PlanFile() if options.plan is None else read_plan_file(at_home(options.plan))
    one = read_file(options.config) if options.config else {}
    base = {**{name: value for name, value in one.items() if name not in OWNED}, **file.base, **flags}
    sweep = {name: values for name, values in file.sweep.items() if name not in flags} | swept
    base = {name: value for name, value in base.items() if name not in sweep}
    recipe = preset_values(base.pop("preset", None))
    if file.arms and sweep:
        raise ConfigError(
            "a plan with named arms cannot also sweep a field",
            got=f"arms in {options.plan}, and {', '.join(sweep)} with several values",
            why="each of the two says what the arms are",
            fix="write the combinations as arms, or leave the arms out",
        )
    arms = tuple(_expanded(arm, shared=recipe, fixed={*base, *sweep}) for arm in file.arms or grid(sweep))
    base = {**DEFAULTS, **recipe, **base}
    given = list(options.seeds)
    seeds = seeds_of(given[0] if len(given) == 1 else given, "--seeds") if "seeds" in own else file.seeds
    task = Path(str(base.get("task", "arithmetic"))).stem
    name = file.name or "-".join(sweep) or Path(options.plan or task).stem
    kl_prompts = options.kl_prompts or file.kl_prompts or KL_PROMPTS
    plan = Plan(name=folder_name(name), base=base, arms=arms, seeds=seeds or (0, 1, 2), kl_prompts=kl_prompts)
    for flag, value in flags.items():
        if all(flag in arm.values for arm in arms):
            raise ConfigError(
                f"--{flag} has no effect",
                got=f"--{flag} {value}",
                why="every arm of the plan sets it",
                fix=f"leave --{flag} out, or change the arms",
            )
    return plan, options


def _read(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The options of a command line, the fields that it sets for all arms, and those that it sweeps."""
    own = {name: field for name, field in fields_of(AblateOptions).items() if name != "preset"}  # that may be compared
    fields = train_fields() | own
    several = {name for name, field in fields.items() if name not in own and field.count == 1}
    known, given, swept = by_any_name(fields), dict[str, Any](), set[str]()
    for name, texts in split_argv(fields, argv, command="klamp ablate", several=several).items():
        field, shown = known[name], f"--{name}"
        if field.name in several and len(texts) > 1:
            given[name] = tuple(field.read([text], shown=shown) for text in texts)
            swept.add(field.name)
        else:
            given[name] = field.read(texts, shown=shown)
    given = resolve_aliases(given, set(fields), ALL_ALIASES)
    here = given.get("ray") is None
    for name in ("cpus_per_run", "gpus_per_run") if here else ("workers",):
        if given.get(name) is not None:
            raise ConfigError(
                f"--{name} has no meaning {'without' if here else 'with'} --ray",
                got=given[name],
                why="a cluster starts as many runs as its CPUs and GPUs carry; here klamp counts cores and GPUs itself",
                fix=f"leave --{name} out",
            )
    options = {name: value for name, value in given.items() if name in own}
    base = {name: value for name, value in given.items() if name not in (*own, *swept)}
    return options, base, {name: given[name] for name in given if name in swept}


def _expanded(arm: Arm, *, shared: Mapping[str, Any], fixed: Collection[str]) -> Arm:
    """The arm with the fields of its preset.

    Args:
        arm: may set `preset`.
        shared: fields that the preset of the base sets; an arm with another preset has their defaults.
        fixed: fields that base or sweep set; they win over the same fields of any preset.
    """
    values = dict(arm.values)
    preset = values.pop("preset", None)
    if preset is None:
        return Arm(name=arm.name, values=values)
    defaults = TrainConfig().flat()
    recipe = {name: defaults[name] for name in shared} | preset_values(preset)
    return Arm(name=arm.name, values={n: v for n, v in recipe.items() if n not in fixed} | values)


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
    """Held-out prompts that the KL is measured on; None: the file does not say."""


def read_plan_file(path: Path) -> PlanFile:
    """The plan in a YAML file.

        name: beta                     # of the folder
        base: {max_steps: 60}          # any field of klamp train, flat or under its section; also preset
        sweep: {beta: [0, 0.01]}       # every combination is an arm
        arms: {no KL: {beta: 0}}       # or arms by name
        seeds: 3                       # how many, or a list of them
        kl_prompts: 64                 # held-out prompts that the KL is measured on; 256 if left out

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
            why = f"a plan has the keys {', '.join(KEYS)}; fields of klamp train stand under base, sweep and arms"
            raise unknown_key(f"key in {path}", str(key), KEYS, why=why, command="klamp ablate")
    arms, sweep = (mapping_of(content.get(part), f"{part} in {path}") for part in ("arms", "sweep"))
    prompts = fields_of(AblateOptions)["kl_prompts"]
    return PlanFile(
        name=str(content.get("name") or ""),
        base=read_entries(mapping_of(content.get("base"), f"base in {path}"), path),
        sweep=dict(_values(field_name(str(key)), values, path) for key, values in sweep.items()),
        arms=tuple(
            Arm(name=str(name), values=read_entries(mapping_of(values, f"the arm {name} in {path}"), path))
            for name, values in arms.items()
        ),
        seeds=None if content.get("seeds") is None else seeds_of(content["seeds"], f"seeds in {path}"),
        kl_prompts=prompts.read([str(content.get("kl_prompts"))], shown=f"kl_prompts in {path}"),
    )


def seeds_of(value: object, shown: str) -> tuple[int, ...]:
    """The seeds: from a number, that many starting at 0; from a list, the seeds in it.

    Args:
        value: what was given.
        shown: where it stands, for the message.

    Raises:
        ConfigError: it is neither, or not at least one seed.
    """
    seeds: Sequence[Any] = range(value) if type(value) is int else value if isinstance(value, list) else ()
    if not 1 <= len(seeds) <= MOST_SEEDS or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(
            f"{shown} cannot be read",
            got=repr(value),
            why="it takes how many seeds there are, or the seeds, whole numbers of at least 0",
            fix="3 stands for the seeds 0, 1 and 2",
        )
    return tuple(seeds)


def _values(name: str, values: object, path: Path) -> tuple[str, tuple[Any, ...]]:
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"sweep of {name} in {path} is no list",
            got=repr(values),
            why="a field is swept over several values",
            fix=f"{name}: [{values}, ...], or move it to base",
        )
    read = [read_entry(name, value, path) for value in values]
    return read[0][0], tuple(value for _, value in read)
