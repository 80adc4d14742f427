"""What the commands of all studies share: the plan goes into a folder, and `klamp ablate` does the rest."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from klamp.cli import main as klamp
from klamp.cli.text import exit_code, show_error
from klamp.config import KLWarning
from klamp.errors import KlampError
from klamp.lab.ablate.execute import PLAN, check_folder
from klamp.lab.ablate.plan import Plan, plan_text
from klamp.lab.folders import free_folder, write_whole


def ablate(plan: Plan, argv: Sequence[str]) -> tuple[int, Path]:
    """Run a study as `klamp ablate` runs any plan; the same command with its --output_dir continues what is not done.

    Args:
        plan: of the study.
        argv: the command's arguments; what is no flag of `parser_of` is one of `klamp ablate`: --workers, --dry_run.

    Returns:
        The exit code of `klamp ablate`, and the folder of the study, where there is one.
    """
    given, others = parser_of(plan).parse_known_args(argv)
    plan = replace(plan, seeds=tuple(given.seeds))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KLWarning)  # `klamp ablate` says it once more
            folder = Path(given.output_dir) if given.output_dir else free_folder(Path("runs"), f"ablation-{plan.name}")
            check_folder(folder, plan)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / PLAN, plan_text(plan))
    except KlampError as error:
        show_error(error)
        return exit_code(error), Path()
    return klamp(["ablate", "--plan", str(folder / PLAN), "--output_dir", str(folder), *others]), folder


def parser_of(plan: Plan) -> argparse.ArgumentParser:
    """The flags of a study's command.

    Args:
        plan: of the study.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{plan.name}",
        description=f"{len(plan.arms)} arms; every other flag is one of `klamp ablate`, which runs the plan.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=plan.seeds, help="that every arm is run with")
    parser.add_argument("--output_dir", help="the folder; without it the next free one")
    return parser
