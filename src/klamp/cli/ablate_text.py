"""What `klamp ablate` says before the runs (`--dry_run`) and after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from klamp.ablation.execute import Result
from klamp.ablation.executor import Executor
from klamp.ablation.outcome import GROUPS, read_outcome
from klamp.ablation.plan import Plan, Run, run_folder, shown
from klamp.ablation.table import comparison_lines, comparison_title, lines, notes
from klamp.cli.describe import describe_model, describe_task, tool
from klamp.cli.tables import show_paragraph, show_table
from klamp.training.config import TrainConfig


def show_plan(console: Console, plan: Plan, every: Sequence[Run], *, folder: Path, executor: Executor) -> None:
    """Print the plan of an ablation; nothing is started, loaded or written.

    Args:
        console: where to.
        plan: what is asked for.
        every: its runs.
        folder: where they would go.
        executor: who would run them.
    """
    out, first = cast(TextIO, console.file), every[0].config
    print("klamp ablate --dry_run: nothing is started, loaded or written\n", file=out)
    states = [_state(folder, run) for run in every]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    for label, text in (
        ("runs", f"{len(every)}: {len(plan.arms)} arms x {len(plan.seeds)} seeds ({_listed(plan.seeds)})"),
        ("steps", f"{sum(run.config.run.max_steps for run in every):,} in all"),
        ("folder", f"{folder} ({counted})"),
        ("where", executor.describe()),
        ("task", describe_task(first)),
        ("model", describe_model(first)),
        ("common", _common(plan)),
    ):
        show_paragraph(out, text, label=label)
    fields = list(dict.fromkeys(name for arm in plan.arms for name in arm.values))
    rows = [
        (arm.name, *(shown(run.config.flat()[name]) for name in fields))
        for arm, run in zip(plan.arms, every, strict=False)
    ]
    print(file=out)
    show_table(out, "arms", ("arm", *fields), rows)


def show_result(console: Console, result: Result, command: str) -> None:
    """Print the table of results, the runs that failed, and the paths of all files.

    Args:
        console: where to.
        result: of the ablation.
        command: that was given; the same goes on with what failed.
    """
    out = cast(TextIO, console.file)
    for group, title in GROUPS.items():
        heading, rows = lines(result.table, group)
        if heading:
            print(file=out)
            show_table(out, title, heading, rows)
    heading, rows = comparison_lines(result.table)
    if heading:
        print(file=out)
        show_table(out, comparison_title(result.table), heading, rows)
    print(file=out)
    for note in notes(result.table):
        show_paragraph(out, note, width=0)
    for outcome in result.failed:
        log = result.folder / "runs" / outcome.run / "log.txt"
        print(f"\nfailed: {outcome.arm}, seed {outcome.seed}: {outcome.error.rstrip()}", file=out)
        if log.exists() and str(log) not in outcome.error:
            print(f"  log: {log}", file=out)
    print(file=out)
    for label, text in _files(result, command):  # not wrapped, so that a command can be copied
        print(f"  {label:<12} {text}", file=out)


def _files(result: Result, command: str) -> list[tuple[str, str]]:
    """The paths of the ablation's files, and the commands that can follow."""
    folder = result.folder
    found = [("folder", str(folder))]
    found += [("written", _by_name(result.files))]
    done = [outcome for outcome in result.outcomes if outcome.state == "done"]
    if done and result.not_drawn:
        found.append(("not drawn", "; ".join(f"{name}: {why}" for name, why in result.not_drawn.items())))
    if done:
        found.append(("look closer", f"{tool('klamp')} report {folder}"))
    if result.failed:
        found.append(("try again", command))
    return found


def _by_name(files: Sequence[Path]) -> str:
    """The names of files, those that differ in their ending as one: `sweep.png/.pdf/.svg`."""
    endings: dict[str, list[str]] = {}
    for file in files:
        endings.setdefault(file.stem, []).append(file.suffix)
    return ", ".join(stem + "/".join(each) for stem, each in endings.items())


def _state(folder: Path, run: Run) -> str:
    """What happens to a run when the ablation is started again."""
    own = run_folder(folder, run)
    outcome = read_outcome(own)
    if outcome is not None and outcome.state == "done":
        return "done"
    if any((own / "checkpoints").glob("step-*")):
        return "to continue"
    return "failed, to try again" if outcome is not None else "to run"


def _common(plan: Plan) -> str:
    """The fields that all arms share and that differ from the defaults."""
    defaults = TrainConfig().flat()
    swept = {name for arm in plan.arms for name in arm.values}
    set_here = {n: v for n, v in plan.base.items() if n not in swept and v != defaults.get(n)}
    return ", ".join(f"{name}={shown(value)}" for name, value in set_here.items()) or "the defaults of klamp train"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
