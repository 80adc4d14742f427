"""From a command line and a YAML file to the configuration of a run: defaults < preset < file < flags.

For a run that is resumed, its own configuration replaces the defaults.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from klamp.cli.flags import Options, by_any_name, field_name, fields_of, read_argv, train_fields, unknown_key
from klamp.cli.options import TrainOptions
from klamp.config import find_preset
from klamp.errors import ConfigError, brief
from klamp.files import at_home, with_end, yaml_of
from klamp.training.config import TrainConfig, section_classes
from klamp.training.folders import CONFIG
from klamp.training.resumed import HISTORY

NOT_IN_FILES = ("config", "dry_run", "prepare")
"""Options that a YAML file cannot hold, only a command line."""
FORM = "one `name: value` per line, for example `beta: 0.01`"


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What a command line of `klamp train` asks for."""

    config: TrainConfig
    """The configuration of the run."""
    options: TrainOptions
    """The options of `klamp train` itself."""
    given: frozenset[str]
    """The fields that a flag, the file or the preset sets."""


def parse_train(argv: Sequence[str]) -> TrainRequest:
    """The configuration that a command line describes; raises a ConfigError for what cannot work."""
    return request_of(read_argv(train_fields(), argv, command="klamp train"))


def request_of(flags: dict[str, Any]) -> TrainRequest:
    """The configuration that flags (fields and their values) describe, with the file and the preset that they name."""
    file = read_file(flags["config"]) if flags.get("config") is not None else {}
    asked = file | flags
    if isinstance(folder := asked.get("resume"), str):
        if at_home(flags.get("output_dir") or folder) != at_home(folder):
            raise ConfigError(
                "two folders are named",
                got=f"resume {folder}, output_dir {flags['output_dir']}",
                why="a run continues in its own folder",
                fix=f"leave output_dir out; to keep the run as it is, copy {folder} and resume the copy",
            )
        asked |= {"resume": True, "output_dir": folder}
    options, values = apart({**preset_values(asked.get("preset")), **asked}, TrainOptions)
    own = at_home(asked["output_dir"]) / CONFIG if asked.get("resume") and asked.get("output_dir") else None
    base = read_file(own) if own is not None and own.is_file() else {}
    return TrainRequest(config=TrainConfig.from_flat(base | values), options=options, given=frozenset(values))


def apart(given: Mapping[str, Any], options: type[Options]) -> tuple[Options, dict[str, Any]]:
    """The given fields in two parts: the options of a command, and the fields of the configuration."""
    own = fields_of(options).keys()
    rest = {name: value for name, value in given.items() if name not in own}
    return options(**{name: value for name, value in given.items() if name in own}), rest


def preset_values(name: str | None) -> dict[str, Any]:
    """The KL and loss fields in which a recipe differs from the defaults; without a name, none."""
    if name is None:
        return {}
    preset, defaults = find_preset(name), TrainConfig().flat()
    recipe = {**dataclasses.asdict(preset.kl), **dataclasses.asdict(preset.loss)}
    return {field: value for field, value in recipe.items() if value != defaults[field]}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a repeated key instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is repeated", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_file(path: str | Path) -> dict[str, Any]:
    """The fields that a YAML file sets, under their own names; a ConfigError for what cannot be read.

    Keys are the flags' names, flat or under their section (`kl: {beta: 0.01}`).
    """
    path = at_home(path)
    return read_entries(load_yaml(path), path)


def read_entries(content: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The fields that a mapping of a YAML file sets, flat or under their section; `path` is for messages."""
    merged: dict[str, Any] = {}
    for section, inner in content.items():
        if section == HISTORY and isinstance(inner, list):  # the former steps of a run, in its own file
            continue
        flat = not (section in section_classes() and isinstance(inner, Mapping))
        for key, value in [(section, inner)] if flat else inner.items():
            name, read = read_entry(field_name(str(key)), value, path)
            if name in merged and merged[name] != read:
                raise ConfigError(
                    f"{name} is given twice in {path}, with different values",
                    got=f"{merged[name]!r} and {read!r}",
                    why="the file has two names of it, or has it flat and under its section",
                    fix="keep one",
                )
            merged[name] = read
    return merged


def load_yaml(path: Path) -> Mapping[Any, Any]:
    """The mapping that a YAML file holds; a ConfigError if there is no such file, no valid YAML, or no mapping."""
    try:
        content = yaml_of(with_end(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        near = sorted(each.name for each in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
        fix = f"files there: {', '.join(near)}" if near else "give the path of a YAML file"
        raise ConfigError("the configuration file cannot be read", got=str(path), why=reason, fix=fix) from error
    except ValueError as error:
        raise ConfigError(
            "the configuration file is not valid YAML", got=str(path), why=brief(str(error)), fix=FORM
        ) from error
    return mapping_of(content, f"the configuration file {path}")


def mapping_of(content: object, what: str) -> Mapping[Any, Any]:
    """The mapping in a part of a YAML file; nothing is an empty mapping, and anything else a ConfigError."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{what} holds no names", got=f"{type(content).__name__}: {brief(repr(content))}", fix=FORM)
    return content


def read_entry(key: str, value: object, path: Path) -> tuple[str, Any]:
    """The name of a field, and its value from a YAML file: a scalar, or a list for a field with several values."""
    known = {name: field for name, field in by_any_name(train_fields()).items() if name not in NOT_IN_FILES}
    if key not in known:
        why = "it is an option of the command line" if key in NOT_IN_FILES else "it is no field of the configuration"
        raise unknown_key(f"key in {path}", key, known, why=why, command="klamp train")
    field, shown = known[key], f"{key} in {path}"
    each = value if isinstance(value, list | tuple) else [value]
    several = isinstance(value, list | tuple) or NoneType not in field.types
    if any(isinstance(one, Mapping | list) or (one is None and several) for one in each):
        raise field.refused([str(value)], shown=shown)
    return field.name, field.read([str(one) for one in each], shown=shown)
