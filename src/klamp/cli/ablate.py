"""`klamp ablate`: parse, show, run, sum up; with --runs, the comparison of existing runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from klamp.cli.arguments import load_yaml, mapping_of, preset_values, read_entries, read_file
from klamp.cli.commands import AblateOptions, fields_after, read_command
from klamp.cli.display import Drawn
from klamp.cli.report import records
from klamp.cli.text import FAILED, number, say, show_paragraph, show_table
from klamp.errors import ConfigError, TrainingStopped, unknown_name, without_credentials
from klamp.files import at_home
from klamp.lab.ablate.execute import Executor, check_folder, compare, execute, local_executor
from klamp.lab.ablate.plan import KL_PROMPTS, OWNED, Arm, Plan, Run, as_runs, folder_name, grid, plan_text, runs
from klamp.lab.ablate.results import NOTES, ArmRow, Outcome, Result, is_done, text_table
from klamp.lab.folders import free_folder, read_config

DEFAULTS: Mapping[str, Any] = {"report_to": (), "keep_checkpoints": 1}
"""Field -> an ablation's default if it differs from `klamp train`'s: many runs need much room on disk."""


def run(argv: Sequence[str], *, console: Console | None = None, executor: Executor | None = None) -> int:
    """Run an ablation, or compare existing runs; 1 if one failed. `executor`: None is processes here, or --ray's."""
    plan, options = parse_ablate(argv)
    command = shlex.join(["klamp", "ablate", *map(without_credentials, argv)])
    if options.runs:
        return compare_runs(options, command)
    every = runs(plan)
    output_dir = options.output_dir
    folder = at_home(output_dir) if output_dir else free_folder(Path("runs"), f"ablation-{plan.name}")
    executor = executor or _executor(options, every)
    check_folder(folder, plan)
    if options.dry_run:
        say("klamp ablate --dry_run: nothing is started, loaded or written\n")
        done, steps = sum(is_done(folder, run) for run in every), sum(run.config.run.max_steps for run in every)
        progress = f"{done} of {len(every)} done; {steps:,} steps"
        say(f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}, {progress}")
        say(f"{executor.describe()}\n\n{plan_text(plan).rstrip()}")
        return 0
    command += "" if output_dir else f" --output_dir {shlex.quote(str(folder))}"
    return _execute(plan, every, folder=folder, executor=executor, console=console, command=command)


def _execute(
    plan: Plan, every: Sequence[Run], *, folder: Path, executor: Executor, console: Console | None, command: str
) -> int:
    import matplotlib  # noqa: F401  (if it is missing, the error comes now and not after the last run)

    drawn, ended = Drawn(console), list[Run]()

    def tell(run: Run, outcome: Outcome | None) -> None:
        ended.extend([] if outcome is None else [run])
        text = "started" if outcome is None else f"{outcome.state} {outcome.error.partition(chr(10))[0]}".rstrip()
        drawn.move("runs", len(ended), len(every))
        drawn.say(f"[{len(ended)}/{len(every)} ended] {run.arm.name}, seed {run.seed}: {text}")

    say(f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}; {executor.describe()}")
    with closing(drawn):
        try:
            result = execute(plan, folder, executor, tell=tell, progress=drawn.on_loading)
        except TrainingStopped as stopped:
            stopped.fix = f"continue with: {command}"
            raise
    return show_result(result, command)


def _executor(options: AblateOptions, every: Sequence[Run]) -> Executor:
    if options.ray is None:
        return local_executor(len(every), workers=options.workers, cpu=all(run.config.run.cpu for run in every))
    from klamp.lab.ablate.execute import RayExecutor

    cpus = 1.0 if options.cpus_per_run is None else options.cpus_per_run
    return RayExecutor(address=options.ray, cpus_per_run=cpus, gpus_per_run=options.gpus_per_run or 0.0)


def parse_ablate(argv: Sequence[str]) -> tuple[Plan, AblateOptions]:
    """The ablation that a command line describes, and the options of `klamp ablate` itself.

    The last one of these wins: defaults, preset, --config (without `OWNED`), the plan's base, flags, what an arm sets.
    """
    fields = fields_after("ablate")
    several = {name for name, field in fields.items() if (field.section or name == "preset") and field.count == 1}
    options, flags = read_command("ablate", argv, several)
    _check_options(options, flags)
    flags |= {} if options.preset is None else {"preset": options.preset}
    plan, path = read_plan(options.plan), Path(options.plan or "")
    one = read_file(options.config) if options.config else {}
    base, sweep = (read_entries(mapping_of(plan.get(x), f"{x} in {path}"), path, several) for x in ("base", "sweep"))
    values = {**{name: value for name, value in one.items() if name not in OWNED}, **base, **sweep, **flags}
    sweep = {name: value for name, value in values.items() if isinstance(value, list)}
    base = {name: value for name, value in values.items() if name not in sweep}
    arms = tuple(
        Arm(name=str(name), values=read_entries(mapping_of(values, f"the arm {name} in {path}"), path))
        for name, values in mapping_of(plan.get("arms"), f"arms in {path}").items()
    )
    if arms and sweep:
        got, why = f"arms, and several values of {', '.join(sweep)}", "a named arm says what all of its fields are"
        fix = "write the combinations as arms"
        raise ConfigError("a plan with named arms cannot also sweep a field", got=got, why=why, fix=fix)
    arms, preset = arms or grid(sweep), base.pop("preset", None)
    if any("preset" in arm.values for arm in arms):
        arms, preset = tuple(_with_recipe(arm, preset, values) for arm in arms), None
    if ignored := [flag for flag in flags if flag not in sweep and all(flag in arm.values for arm in arms)]:
        why, fix = "every arm of the plan sets it", f"leave --{ignored[0]} out, or change the arms"
        raise ConfigError(f"--{ignored[0]} has no effect", why=why, fix=fix)
    seeds = options.seeds[0] if len(options.seeds) == 1 else list(options.seeds) or plan.get("seeds", 3)
    name = plan.get("name") or "-".join(sweep) or Path(options.plan or str(base.get("task", "arithmetic"))).stem
    return Plan(
        name=folder_name(str(name)),
        base={**DEFAULTS, **preset_values(preset), **base},
        arms=arms,
        seeds=seeds_of(seeds),
        kl_prompts=options.kl_prompts or plan.get("kl_prompts", KL_PROMPTS),
    ), options


def _with_recipe(arm: Arm, preset: str | None, fixed: Mapping[str, Any]) -> Arm:
    """The arm with the fields of its preset (else the base's), except the fixed ones, which win."""
    values = {"preset": preset, **arm.values}
    recipe = preset_values(values.pop("preset"))
    return Arm(name=arm.name, values={name: value for name, value in recipe.items() if name not in fixed} | values)


def _check_options(options: AblateOptions, flags: Mapping[str, Any]) -> None:
    names = {*flags, *(name for name, value in vars(options).items() if value not in (None, False, ()))}
    ignored, where, why = names & {"cpus_per_run", "gpus_per_run"}, "without --ray", "processes here share all devices"
    if options.ray is not None:
        ignored, where, why = names & {"workers"}, "with --ray", "the cluster starts as many runs as it has room for"
    if options.runs:
        ignored, where, why = names - {"runs", "output_dir", "kl_prompts"}, "with --runs", "nothing is trained"
    if ignored:
        raise ConfigError(f"--{min(ignored)} has no meaning {where}", why=why, fix=f"leave --{min(ignored)} out")


def read_plan(file: str | None) -> Mapping[str, Any]:
    """What a plan's YAML file (docs/ablation.md) holds; a ConfigError for what cannot be read."""
    content, keys = load_yaml(at_home(file)) if file else {}, ("name", "base", "sweep", "arms", "seeds", "kl_prompts")
    if unknown := [str(key) for key in content if key not in keys]:
        why = f"a plan has the keys {', '.join(keys)}; fields of klamp train belong under base, sweep and arms"
        raise unknown_name(f"key in {file}", unknown[0], keys, why=why)
    prompts = content.get("kl_prompts", KL_PROMPTS)
    if type(prompts) is not int or prompts < 1:
        why, fix = "it is a number of held-out prompts", "write a whole number of 1 or more"
        raise ConfigError(f"kl_prompts in {file} cannot be read", got=repr(prompts), why=why, fix=fix)
    return content


def seeds_of(value: object) -> tuple[int, ...]:
    """The seeds: from a number, that many starting at 0; from a list, the seeds in it."""
    seeds: Sequence[Any] = range(value) if type(value) is int else value if isinstance(value, list) else ()
    if not 1 <= len(seeds) <= 1000 or not all(type(seed) is int and seed >= 0 for seed in seeds):
        why = "they are a number of seeds, or the seeds, whole numbers of at least 0"
        raise ConfigError("seeds cannot be read", got=repr(value), why=why, fix="3 means the seeds 0, 1 and 2")
    return tuple(seeds)


def show_result(result: Result, command: str) -> int:
    """Print the table, the runs that failed, and the paths of all files; returns the exit code."""
    failures = [outcome for outcome in result.outcomes if outcome.state == "failed"]
    headings, *rows = text_table(result.table)
    say()
    show_table("means over seeds", headings, rows)
    say()
    for note in NOTES:
        show_paragraph(note, width=0)
    for outcome in failures:
        say(f"\nfailed: {outcome.arm}, seed {outcome.seed}: {outcome.error.rstrip()}")
        say(f"  log: {result.folder / 'runs' / outcome.run / 'log.txt'}")
    say()
    say(f"  folder       {result.folder}")  # not wrapped, as a command, so that it can be copied
    say(f"  written      {', '.join(file.name for file in result.files)}")
    if (result.folder / "runs").exists():
        say(f"  look closer  klamp report {result.folder}")
    if failures:
        say(f"  try again    {command}")
    return FAILED if failures else 0


def compare_runs(options: AblateOptions, command: str) -> int:
    """Measure the runs, write their table and picture, show them; returns the exit code."""
    import matplotlib  # noqa: F401  (if it is missing, the error comes now and not after the last measurement)

    configs = [(folder, read_config(folder)[1]) for folder in records(options.runs)]
    compared = as_runs(configs, kl_prompts=options.kl_prompts or KL_PROMPTS)
    folder = at_home(options.output_dir) if options.output_dir else free_folder(Path("runs"), "comparison")
    check_folder(folder)
    say(f"{len(compared)} runs are compared in {folder}; nothing is trained")
    result = compare(compared, folder, lambda run: say(f"measuring {run.name}"))
    code = show_result(result, command)
    say("\n".join(("", *summary_lines(result.table))))
    return code


def summary_lines(table: Sequence[ArmRow]) -> list[str]:
    """A line for each arm, as in the GRPO tutorial: `beta=0.01: Acc=85.0%, KL=0.08, retention=82.0%`."""
    named = {"Acc": "rl/after", "KL": "kl/reverse", "retention": "retained/after"}
    lines: list[str] = []
    for row in table:
        means = {word: row.cells[name].mean for word, name in named.items() if name in row.cells}
        texts = [f"{w}={f'{x:.1%}' if w != 'KL' and 0 <= x <= 1 else number(x)}" for w, x in means.items()]
        lines += [f"{row.arm}: {', '.join(texts)}"] if means else []
    return lines
