"""`klamp ablate`: parse, show, run, sum up."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from klamp.ablation.execute import check_folder, check_references, find_folder
from klamp.ablation.executor import Executor
from klamp.ablation.plan import Plan, Run, runs
from klamp.cli.ablate_arguments import AblateRequest, parse_ablate
from klamp.cli.describe import tool
from klamp.cli.errors import FAILED
from klamp.cli.options import AblateOptions
from klamp.errors import ConfigError, TrainingStopped, without_credentials


def run(argv: Sequence[str], *, console: Console | None = None, executor: Executor | None = None) -> int:
    """Run `klamp ablate` with these arguments; returns the exit code: 1 where a run failed.

    Args:
        argv: the arguments after `ablate`.
        console: where the runs are shown; None: stdout.
        executor: who runs them; None: processes on this machine, or the Ray cluster that is asked for.

    Raises:
        KlampError: whatever stops the ablation as a whole; the caller shows it.
    """
    request = parse_ablate(argv)
    if request.options.runs:
        from klamp.cli.ablate_runs import compare_runs

        command = shlex.join([tool("klamp"), "ablate", *map(without_credentials, request.argv)])
        return compare_runs(request.options, console or Console(highlight=False), command)
    plan, options = request.plan, request.options
    every = runs(plan)
    folder = Path(options.output_dir) if options.output_dir else find_folder(plan)
    console = console or Console(highlight=False)
    executor = executor or _executor(options, every)
    with _loading(console):
        check_references(every)
        check_folder(plan, folder)
    if options.dry_run:
        from klamp.cli.ablate_text import show_plan

        show_plan(console, plan, every, folder=folder, executor=executor)
        return 0
    return _execute(request, plan, every, folder=folder, executor=executor, console=console)


def _execute(
    request: AblateRequest, plan: Plan, every: Sequence[Run], *, folder: Path, executor: Executor, console: Console
) -> int:
    import matplotlib  # noqa: F401  (where it is missing, that is said now and not after the last run)

    from klamp.ablation.execute import execute
    from klamp.cli.ablate_text import show_result
    from klamp.cli.ablate_view import board_for

    print(f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}; {executor.describe()}", file=console.file)
    command = _command(request, folder)
    board = board_for(console, every)
    try:
        result = execute(plan, folder, executor, tell=board.tell, progress=board.loading)
    except TrainingStopped as stopped:
        stopped.fix = f"continue with: {command}"
        raise
    finally:
        board.close()
    show_result(console, result, command)
    return FAILED if result.failed else 0


def _executor(options: AblateOptions, every: Sequence[Run]) -> Executor:
    if options.ray is None:
        from klamp.ablation.local import local_executor

        return local_executor(len(every), workers=options.workers, cpu=all(each.config.run.cpu for each in every))
    if options.workers is not None:
        raise ConfigError(
            "--workers has no meaning with --ray",
            got=f"--workers {options.workers}",
            why="the cluster starts as many runs as its CPUs and GPUs carry",
            fix="leave --workers out",
        )
    from klamp.ablation.cluster import RayExecutor

    return RayExecutor(address=options.ray, cpus_per_run=options.cpus_per_run, gpus_per_run=options.gpus_per_run)


def _command(request: AblateRequest, folder: Path) -> str:
    """The command line that continues this ablation with the runs that are not done."""
    words = [tool("klamp"), "ablate", *map(without_credentials, request.argv)]
    if request.options.output_dir is None:
        words += ["--output_dir", str(folder)]
    return shlex.join(words)


def _loading(console: Console) -> AbstractContextManager[object]:
    """On a terminal, say that libraries are loading: importing them takes some seconds."""
    return console.status("loading libraries") if console.is_terminal else nullcontext()
