"""From a command line to the configuration of a run: defaults < preset < file < flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klamp.cli.config_file import read_file
from klamp.cli.options import TrainOptions
from klamp.cli.train_fields import read_flags
from klamp.config import find_preset
from klamp.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What a command line of `klamp train` asks for."""

    config: TrainConfig
    """The configuration of the run."""
    options: TrainOptions
    """The options of `klamp train` itself."""
    sources: Mapping[str, str]
    """Field name -> who set it, where somebody did: `preset NAME`, `file PATH`, or `flag`."""
    argv: tuple[str, ...]
    """The words of the command line, as they were typed."""


def parse_train(argv: Sequence[str]) -> TrainRequest:
    """The configuration that a command line describes.

    Raises:
        UnknownNameError: an unknown flag, key, preset or choice; names the nearest.
        ConfigError: a value or a combination that cannot work.
    """
    flags = read_flags(argv)
    given = {"flag": flags}
    if flags.get("config") is not None:
        given = {f"file {flags['config']}": read_file(flags["config"]), **given}
    preset = {name: value for values in given.values() for name, value in values.items() if name == "preset"}
    if preset.get("preset") is not None:
        given = {f"preset {preset['preset']}": preset_values(preset["preset"]), **given}
    options, values, sources = _merge(given)
    return TrainRequest(
        config=TrainConfig.from_flat(values), options=TrainOptions(**options), sources=sources, argv=tuple(argv)
    )


def preset_values(name: str) -> dict[str, Any]:
    """The KL and loss fields in which a recipe differs from the defaults.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a printed formula that is no penalty on KL(policy||ref).
    """
    preset, defaults = find_preset(name), TrainConfig().flat()
    recipe = {**dataclasses.asdict(preset.kl), **dataclasses.asdict(preset.loss)}
    return {field: value for field, value in recipe.items() if value != defaults[field]}


def _merge(given: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Merge the sources into (options, configuration values, who set each value); later sources win."""
    own = {field.name for field in dataclasses.fields(TrainOptions)}
    options: dict[str, Any] = {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, fields in given.items():
        options |= {name: value for name, value in fields.items() if name in own}
        values |= {name: value for name, value in fields.items() if name not in own}
        sources |= {name: source for name in fields if name not in own}
    return options, values, sources
