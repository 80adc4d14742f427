"""`klamp ablate --runs FOLDER ...`: the comparison of runs that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from klamp.cli.errors import FAILED
from klamp.cli.options import AblateOptions
from klamp.errors import ConfigError, DataError

if TYPE_CHECKING:  # imported by the command only
    from klamp.ablation.comparison import Compared
    from klamp.ablation.table import Table

BESIDE = ("runs", "output_dir", "kl_prompts")
"""Options of `klamp ablate` that have a meaning for runs that are there already."""
IN_A_LINE = {"Acc": "rl/after", "KL": "kl/reverse", "retention": "retained/after"}
"""Word in the summary's lines -> column: the three numbers of the GRPO tutorial."""


def check_alone(others: Sequence[str]) -> None:
    """Refuse what the comparison of runs would pass over.

    Args:
        others: the options and fields that were given.

    Raises:
        ConfigError: there is one that it does not take.
    """
    left = [name for name in others if name not in BESIDE]
    if left:
        raise ConfigError(
            f"--{left[0]} has no meaning with --runs",
            got=", ".join(f"--{name}" for name in left),
            why="the runs are there: they are measured and compared as they were made",
            fix="leave it out, or leave --runs out and let klamp ablate train",
        )


def compare_runs(options: AblateOptions, console: Console, command: str) -> int:
    """Measure the runs, write their table and pictures, show them; returns the exit code.

    Args:
        options: with `runs`.
        console: where they are shown.
        command: as it was typed.

    Raises:
        DataError: folders that hold no finished runs of one task.
        RunFolderError: the output folder holds something else.
    """
    import matplotlib  # noqa: F401  (where it is missing, that is said now and not after the last measurement)

    from klamp.ablation.comparison import check_folder, compare, find_folder
    from klamp.cli.ablate_text import show_result

    compared = read_runs(options)
    folder = Path(options.output_dir) if options.output_dir else find_folder(compared)
    check_folder(compared, folder)
    print(f"{len(compared)} runs are compared in {folder}; nothing is trained", file=console.file)
    result = compare(compared, folder, lambda run: print(f"measuring {run.name}", file=console.file, flush=True))
    show_result(console, result, command)
    print("\n".join(("", *summary_lines(result.table))), file=console.file)
    return FAILED if result.failed else 0


def read_runs(options: AblateOptions) -> tuple[Compared, ...]:
    """The runs that are named; of the folder of an ablation, all of its runs.

    Raises:
        DataError: a folder without a run, or runs that cannot be compared.
    """
    from klamp.ablation.comparison import as_runs
    from klamp.ablation.plan import KL_PROMPTS
    from klamp.cli.report import records
    from klamp.records.klamp_run import is_klamp_run, read_config

    folders = records(options.runs)
    for folder in folders:
        if not is_klamp_run(folder):
            raise DataError(
                "the folder holds no run",
                got=str(folder),
                why="a run of klamp train has a config.yaml and a metrics.jsonl; a comparison needs its checkpoint too",
                fix="name the folders that --output_dir named",
            )
    if len(folders) < 2:
        raise DataError(
            "one run cannot be compared",
            got=str(folders[0]),
            why="a comparison needs two",
            fix=f"klamp evaluate --checkpoint {folders[0]}, or name more runs",
        )
    configs = [(folder, read_config(folder)[1]) for folder in folders]
    return as_runs(configs, kl_prompts=options.kl_prompts or KL_PROMPTS)


def summary_lines(table: Table) -> list[str]:
    """A line for each arm, as the GRPO tutorial has them: `beta=0.01: Acc=85%, KL=0.08, retention=82%`.

    Means over the seeds; scores between 0 and 1 as percentages. No arm is called the best: the table's notes say what
    its intervals can tell apart.

    Args:
        table: of the comparison.
    """
    return [
        f"{row.arm}: " + ", ".join(f"{word}={_written(word, row.cells[name].mean)}" for word, name in shown.items())
        for row in table.rows
        if (shown := {word: name for word, name in IN_A_LINE.items() if name in row.cells})
    ]


def _written(word: str, value: float) -> str:
    from klamp.ablation.table import number

    return f"{value:.1%}" if word != "KL" and 0 <= value <= 1 else number(value)
