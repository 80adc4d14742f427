"""From the command line of `klamp ablate` and a plan's YAML file to a plan: several values of a flag are compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.ablation.plan import KL_PROMPTS, OWNED, Arm, Plan, folder_name, grid
from klamp.cli.arguments import load_yaml, mapping_of, preset_values, read_entries, read_entry, read_file
from klamp.cli.flags import field_name, fields_of, read_argv, train_fields, unknown_key
from klamp.cli.options import AblateOptions
from klamp.errors import ConfigError
from klamp.files import at_home
from klamp.training.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {"report_to": (), "keep_checkpoints": 1}
"""Field -> an ablation's default if it differs from that of `klamp train`: many runs need much room on disk."""
BESIDE = ("runs", "output_dir", "kl_prompts")
"""Options of `klamp ablate` that have a meaning for existing runs."""
KEYS = ("name", "base", "sweep", "arms", "seeds", "kl_prompts")


def parse_ablate(argv: Sequence[str]) -> tuple[Plan, AblateOptions]:
    """The ablation that a command line describes, and the options of `klamp ablate` itself.

    The last one of these wins: defaults, preset, --config, the plan's base, flags, what an arm sets. --config takes the
    file of a single run, too; its seed, output_dir and resume are left out.

    Raises:
        UnknownNameError: an unknown flag, key, preset or choice; names the nearest.
        ConfigError: a value that cannot be read, or that would be ignored.
    """
    own = {name: each for name, each in fields_of(AblateOptions).items() if name != "preset"}  # that may be compared
    fields = train_fields() | own
    several = {name for name, each in fields.items() if name not in own and each.count == 1}
    given = read_argv(fields, argv, command="klamp ablate", several=several)
    options = AblateOptions(**{name: value for name, value in given.items() if name in own})
    _check_options(options, given)
    swept = {name: values for name, values in given.items() if isinstance(values, list)}
    flags = {name: value for name, value in given.items() if name not in (*own, *swept)}
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
            fix="write the combinations as arms, or leave the arms out",
        )
    arms = tuple(_expanded(arm, shared=recipe, fixed={*base, *sweep}) for arm in file.arms or grid(sweep))
    if ignored := [flag for flag in flags if all(flag in arm.values for arm in arms)]:
        why, fix = "every arm of the plan sets it", f"leave --{ignored[0]} out, or change the arms"
        raise ConfigError(f"--{ignored[0]} has no effect", why=why, fix=fix)
    base = {**DEFAULTS, **recipe, **base}
    numbers = list(options.seeds)
    seeds = seeds_of(numbers if len(numbers) > 1 else numbers[0], "--seeds")
    name = file.name or "-".join(sweep) or Path(options.plan or str(base.get("task", "arithmetic"))).stem
    kl_prompts = options.kl_prompts or file.kl_prompts or KL_PROMPTS
    seeds = seeds if "seeds" in given else file.seeds or seeds
    return Plan(name=folder_name(name), base=base, arms=arms, seeds=seeds, kl_prompts=kl_prompts), options


def _check_options(options: AblateOptions, given: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored."""
    if options.runs:
        ignored, where = [name for name in given if name not in BESIDE], "with --runs"
    elif options.ray is None:
        ignored, where = [name for name in given if name in ("cpus_per_run", "gpus_per_run")], "without --ray"
    else:
        ignored, where = [name for name in given if name == "workers"], "with --ray"
    if ignored:
        raise ConfigError(f"--{ignored[0]} has no meaning {where}", fix=f"leave --{ignored[0]} out")


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


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan's file holds; None or empty: the file does not have it."""

    name: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arms: tuple[Arm, ...] = ()
    seeds: tuple[int, ...] | None = None
    kl_prompts: int | None = None


def read_plan_file(path: Path) -> PlanFile:
    """The plan in a YAML file; a ConfigError for what cannot be read.

    name: beta                     # of the folder
    base: {max_steps: 60}          # any field of klamp train, flat or under its section; also preset
    sweep: {beta: [0, 0.01]}       # every combination is an arm
    arms: {no KL: {beta: 0}}       # or arms by name
    seeds: 3                       # how many, or a list of them
    kl_prompts: 64                 # held-out prompts that the KL is measured on; 256 if left out
    """
    content = load_yaml(path)
    if not content:
        raise ConfigError(f"the plan in {path} is empty", fix="sweep: {beta: [0, 0.01]}, or arms by name")
    for key in content:
        if key not in KEYS:
            why = f"a plan has the keys {', '.join(KEYS)}; fields of klamp train stand under base, sweep and arms"
            raise unknown_key(f"key in {path}", str(key), KEYS, why=why, command="klamp ablate")
    parts = {part: mapping_of(content.get(part), f"{part} in {path}") for part in ("base", "sweep", "arms")}
    prompts = fields_of(AblateOptions)["kl_prompts"]
    return PlanFile(
        name=str(content.get("name") or ""),
        base=read_entries(parts["base"], path),
        sweep=dict(_values(field_name(str(key)), values, path) for key, values in parts["sweep"].items()),
        arms=tuple(
            Arm(name=str(name), values=read_entries(mapping_of(values, f"the arm {name} in {path}"), path))
            for name, values in parts["arms"].items()
        ),
        seeds=None if content.get("seeds") is None else seeds_of(content["seeds"], f"seeds in {path}"),
        kl_prompts=prompts.read([str(content.get("kl_prompts"))], shown=f"kl_prompts in {path}"),
    )


def seeds_of(value: object, shown: str) -> tuple[int, ...]:
    """The seeds: from a number, that many starting at 0; from a list, the seeds in it."""
    seeds: Sequence[Any] = range(value) if type(value) is int else value if isinstance(value, list) else ()
    if not 1 <= len(seeds) <= 1000 or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(
            f"{shown} cannot be read",
            got=repr(value),
            why="it takes the number of seeds, or the seeds, whole numbers of at least 0",
            fix="3 stands for the seeds 0, 1 and 2",
        )
    return tuple(seeds)


def _values(name: str, values: object, path: Path) -> tuple[str, Sequence[Any]]:
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"sweep of {name} in {path} is no list",
            got=repr(values),
            fix=f"{name}: [{values}, ...], or move it to base",
        )
    read = [read_entry(name, value, path) for value in values]
    return read[0][0], [value for _, value in read]
