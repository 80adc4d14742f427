"""`klamp ablate --help`: the command's own flags, and below them those of `klamp train`."""

from __future__ import annotations

from klamp.ablation.plan import OWNED
from klamp.cli.ablate_arguments import STUDIES, AblateOptions
from klamp.cli.help import print_help

# tyro joins lines that begin with a letter: these are indented so that they stay as they are.
DESCRIPTION = f"""Train the same thing in several ways, several seeds each, and compare what came out.
  Every flag of klamp train can be given. One value holds for all arms; several are compared, and
  several such flags make a grid. Fields that hold several values themselves are compared in a YAML
  plan only. The same command again goes on where it stopped: what is done is kept, what failed is
  tried again.
  Studies that klamp brings along: {", ".join(STUDIES)}. Examples:
    klamp ablate --beta 0 0.001 0.01 0.1 --seeds 3
    klamp ablate --kl_clip_method none hard --kl_clip_threshold 0.05 0.1 --seeds 5 7 11 --dry_run
    klamp ablate --plan plan.yaml --output_dir out --ray auto
    klamp ablate clipping
"""


def print_ablate_help() -> None:
    """Print the help of `klamp ablate`.

    Raises:
        SystemExit: always; tyro leaves when the help is printed.
    """
    print_help("klamp ablate", DESCRIPTION, AblateOptions, hidden=set(OWNED))
