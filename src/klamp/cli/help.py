"""`klamp train --help`: tyro writes it from the configuration classes, their docstrings and their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Annotated, Any

import tyro

from klamp.cli.options import TrainOptions
from klamp.config import ALIASES, PRESETS
from klamp.training.config import section_classes

# tyro joins lines that begin with a letter: these are indented so that they stay as they are.
DESCRIPTION = """Train a language model with GRPO, its KL to a reference held where you want it.
  Without flags the built-in arithmetic task runs: a small model, minutes on a CPU, no download.
  Every field is a flag (--max_steps or --max-steps) and a key of the YAML file of --config.
  What stands further right wins: defaults < --preset < --config < flags.
  Switches: --resume, --no_resume, or --resume True. Examples:
    klamp train
    klamp train --config config_demo.yaml --kl_penalty 0.01 --output_dir out --max_steps 500
    klamp train --preset dapo --dry-run
"""


def print_train_help() -> None:
    """Print the help of `klamp train`, grouped by section.

    Raises:
        SystemExit: always; tyro leaves when the help is printed.
    """
    print_help("klamp train", DESCRIPTION, TrainOptions)


def print_help(command: str, description: str, options: type, *, hidden: Collection[str] = ()) -> None:
    """Print the help of a command that takes the fields of the configuration.

    Args:
        command: as it is called.
        description: what stands above the flags.
        options: class of the command's own flags.
        hidden: fields of the configuration that it does not take.

    Raises:
        SystemExit: always; tyro leaves when the help is printed.
    """
    groups = {command.rpartition(" ")[2]: _mirror(options, ())}
    groups |= {name: _mirror(cls, hidden) for name, cls in section_classes().items()}
    shown = dataclasses.make_dataclass(
        "Train",
        [(name, tyro.conf.OmitArgPrefixes[cls], dataclasses.field()) for name, cls in groups.items()],
        kw_only=True,
    )
    tyro.cli(shown, prog=command, description=description, use_underscores=True, args=["--help"])


def _mirror(cls: type, hidden: Collection[str]) -> Any:
    """The class as tyro shows it: nothing is checked when it is built, and aliases are listed beside their field."""
    return dataclasses.make_dataclass(
        cls.__name__,
        [(each.name, hint, dataclasses.field(default=each.default)) for each, hint in _annotated(cls, hidden)],
        bases=(cls,),
        kw_only=True,
        frozen=True,
        namespace={"__post_init__": lambda self: None, "__doc__": cls.__doc__, "__module__": cls.__module__},
    )


def _annotated(cls: Any, hidden: Collection[str]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields that tyro should show in another way than by their type alone."""
    shown: list[tuple[dataclasses.Field[Any], Any]] = []
    for each in dataclasses.fields(cls):
        aliases = [f"--{alias}" for alias, name in ALIASES.items() if name == each.name]
        if each.name in hidden:
            shown.append((each, Annotated[Any, tyro.conf.Fixed, tyro.conf.SuppressFixed]))
        elif each.name == "preset":
            shown.append((each, Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(PRESETS)}}}")]))
        elif aliases:
            shown.append((each, Annotated[float, tyro.conf.arg(aliases=aliases)]))
    return shown
