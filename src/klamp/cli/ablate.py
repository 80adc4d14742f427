"""`klamp ablate`: parse, show, run, sum up; with --runs, the comparison of existing runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from klamp.ablation.execute import Executor, check_folder
from klamp.ablation.plan import KL_PROMPTS, Plan, Run, as_runs, runs, shown
from klamp.ablation.results import NOTES, ArmRow, Result, is_done, text_table
from klamp.cli.ablate_arguments import parse_ablate
from klamp.cli.describe import describe_model, describe_task, tool
from klamp.cli.options import AblateOptions
from klamp.cli.text import FAILED, say, show_paragraph, show_table
from klamp.errors import DataError, TrainingStopped, without_credentials
from klamp.files import at_home
from klamp.training.folders import free_folder


def run(argv: Sequence[str], *, console: Console | None = None, executor: Executor | None = None) -> int:
    """Run an ablation, or compare existing runs; returns 1 if a run failed.

    Args:
        argv: the arguments after `ablate`.
        console: for the progress of the runs; None: stdout.
        executor: runs them; None: processes on this machine, or the Ray cluster of --ray.
    """
    plan, options = parse_ablate(argv)
    command = shlex.join([tool("klamp"), "ablate", *map(without_credentials, argv)])
    if options.runs:
        return compare_runs(options, command)
    every = runs(plan)
    given = options.output_dir
    folder = at_home(given) if given else free_folder(Path("runs"), f"ablation-{plan.name}")
    executor = executor or _executor(options, every)
    check_folder(folder, plan)
    if options.dry_run:
        show_plan(plan, every, folder=folder, executor=executor)
        return 0
    command += "" if given else f" --output_dir {shlex.quote(str(folder))}"
    console = console or Console(highlight=False)
    return _execute(plan, every, folder=folder, executor=executor, console=console, command=command)


def _execute(
    plan: Plan, every: Sequence[Run], *, folder: Path, executor: Executor, console: Console, command: str
) -> int:
    import matplotlib  # noqa: F401  (if it is missing, the error comes now and not after the last run)

    from klamp.ablation.execute import execute
    from klamp.cli.display import Board

    say(f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}; {executor.describe()}")
    board = Board(console, len(every))
    try:
        result = execute(plan, folder, executor, tell=board.tell, progress=board.on_loading)
    except TrainingStopped as stopped:
        stopped.fix = f"continue with: {command}"
        raise
    finally:
        board.close()
    return show_result(result, command)


def _executor(options: AblateOptions, every: Sequence[Run]) -> Executor:
    if options.ray is None:
        from klamp.ablation.execute import local_executor

        return local_executor(len(every), workers=options.workers, cpu=all(each.config.run.cpu for each in every))
    from klamp.ablation.cluster import RayExecutor

    return RayExecutor(address=options.ray, cpus_per_run=options.cpus_per_run, gpus_per_run=options.gpus_per_run)


IN_A_LINE = {"Acc": "rl/after", "KL": "kl/reverse", "retention": "retained/after"}
"""Word in the summary's lines -> column: the three numbers of the GRPO tutorial."""


def compare_runs(options: AblateOptions, command: str) -> int:
    """Measure the runs, write their table and picture, show them; returns the exit code."""
    import matplotlib  # noqa: F401  (if it is missing, the error comes now and not after the last measurement)

    from klamp.ablation.execute import compare

    compared = read_runs(options)
    folder = at_home(options.output_dir) if options.output_dir else free_folder(Path("runs"), "comparison")
    check_folder(folder)
    say(f"{len(compared)} runs are compared in {folder}; nothing is trained")
    result = compare(compared, folder, lambda run: say(f"measuring {run.name}"))
    code = show_result(result, command)
    say("\n".join(("", *summary_lines(result.table))))
    return code


def read_runs(options: AblateOptions) -> dict[Path, Run]:
    """The named runs; of the folder of an ablation, all of its runs. A DataError if they cannot be compared."""
    from klamp.cli.report import records
    from klamp.records.klamp_run import is_klamp_run, read_config

    folders = records(options.runs)
    for folder in folders:
        if not is_klamp_run(folder):
            fix = "name the folders that --output_dir named"
            raise DataError("the folder holds no run of klamp train", got=str(folder), fix=fix)
    if len(folders) < 2:
        fix = f"klamp evaluate --checkpoint {folders[0]}, or name more runs"
        raise DataError("one run cannot be compared", got=str(folders[0]), fix=fix)
    configs = [(folder, read_config(folder)[1]) for folder in folders]
    return as_runs(configs, kl_prompts=options.kl_prompts or KL_PROMPTS)


def summary_lines(table: Sequence[ArmRow]) -> list[str]:
    """A line for each arm, as in the GRPO tutorial: `beta=0.01: Acc=85%, KL=0.08, retention=82%`.

    Means over the seeds; scores between 0 and 1 as percentages.
    """
    lines: list[str] = []
    for row in table:
        means = {word: row.cells[name].mean for word, name in IN_A_LINE.items() if name in row.cells}
        texts = [f"{w}={f'{x:.1%}' if w != 'KL' and 0 <= x <= 1 else f'{x:.4g}'}" for w, x in means.items()]
        beta, ended = row.values.get("beta"), row.cells.get("beta")
        texts += [f"beta={ended.mean:.4g} at the end"] if ended and beta is not None and ended.mean != beta else []
        lines += [f"{row.arm}: {', '.join(texts)}"] if means else []
    return lines


def show_plan(plan: Plan, every: Sequence[Run], *, folder: Path, executor: Executor) -> None:
    """Print the plan of an ablation; nothing is started, loaded or written."""
    first = every[0].config
    say("klamp ablate --dry_run: nothing is started, loaded or written\n")
    done = sum(is_done(folder, run) for run in every)
    for label, text in (
        ("runs", f"{len(every)}: {len(plan.arms)} arms x {len(plan.seeds)} seeds ({', '.join(map(str, plan.seeds))})"),
        ("steps", f"{sum(run.config.run.max_steps for run in every):,} in all"),
        ("folder", f"{folder} ({done} done, {len(every) - done} to run)"),
        ("where", executor.describe()),
        ("task", describe_task(first)),
        ("model", describe_model(first)),
        ("common", ", ".join(f"{name}={shown(value)}" for name, value in plan.base.items())),
    ):
        show_paragraph(text, label=label)
    fields = list(dict.fromkeys(name for arm in plan.arms for name in arm.values))
    configs = {run.arm.name: run.config.flat() for run in every}
    say()
    rows = [(arm, *(shown(values[name]) for name in fields)) for arm, values in configs.items()]
    show_table("arms", ("arm", *fields), rows)


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
    lines = [("folder", str(result.folder)), ("written", ", ".join(file.name for file in result.files))]
    if (result.folder / "runs").exists():
        lines.append(("look closer", f"{tool('klamp')} report {result.folder}"))
    if failures:
        lines.append(("try again", command))
    for label, text in lines:  # not wrapped, so that a command can be copied
        say(f"  {label:<12} {text}")
    return FAILED if failures else 0
