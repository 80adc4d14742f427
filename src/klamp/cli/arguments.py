"""From a command line and a YAML file to the configuration of a run: defaults < preset < file < flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from klamp.cli.flags import read_value, unknown_key
from klamp.cli.options import TrainOptions
from klamp.cli.train_fields import fields, fields_by_any_name, read_flags
from klamp.config import ALIASES, find_preset
from klamp.config.kl import resolve_aliases
from klamp.errors import ConfigError, brief
from klamp.tasks.files import yaml_of
from klamp.training.config import TrainConfig, section_classes


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
    for source, named in given.items():
        options |= {name: value for name, value in named.items() if name in own}
        values |= {name: value for name, value in named.items() if name not in own}
        sources |= {name: source for name in named if name not in own}
    return options, values, sources


NOT_IN_FILES = ("config", "dry_run", "all", "prepare", "debug")
"""Options that a YAML file cannot hold, only a command line."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that stands twice instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_file(path: str | Path) -> dict[str, Any]:
    """The fields that a YAML file names, under their own names, with their values.

    Keys are the flags' names, flat or under their section (`kl: {beta: 0.01}`).

    Raises:
        UnknownNameError: an unknown key, or an unknown choice; names the nearest.
        ConfigError: no such file, no valid YAML, a value that cannot be read, or two names of one field with
            different values.
    """
    path = Path(path)
    return read_entries(load_yaml(path), path)


def read_entries(content: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The fields that a mapping of a YAML file names; see `read_file`.

    Args:
        content: keys as in a file, flat or under their section.
        path: the file, for messages.
    """
    values = [(key, read_entry(key, value, path)) for key, value in _flat(content, path)]
    merged: dict[str, Any] = {}
    for key, value in values:
        if key in merged and merged[key] != value:
            raise _twice(key, path, merged[key], value)
        merged[key] = value
    return resolve_aliases(merged, set(fields()))


def load_yaml(path: Path) -> Mapping[Any, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: no such file, no valid YAML, or no mapping.
    """
    try:
        content = yaml_of(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        near = sorted(each.name for each in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
        fix = f"files there: {', '.join(near)}" if near else "give the path of a YAML file"
        raise ConfigError("the configuration file cannot be read", got=str(path), why=reason, fix=fix) from error
    except ValueError as error:
        raise ConfigError(
            "the configuration file is not valid YAML",
            got=str(path),
            why=brief(str(error)),
            fix="one `name: value` per line, for example `beta: 0.01`",
        ) from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            "the configuration file holds no names",
            got=f"{path}: {type(content).__name__}",
            why="each line says which field has which value",
            fix="one `name: value` per line, for example `beta: 0.01`",
        )
    return content


def _flat(content: Mapping[Any, Any], path: Path) -> list[tuple[str, Any]]:
    """The entries of a file without its section headings; each key has to stand under its own section."""
    entries: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key not in section_classes() or not isinstance(value, Mapping):
            entries.append((_name(key), value))
            continue
        own = {each.name for each in dataclasses.fields(section_classes()[key])}
        own |= {alias for alias, name in ALIASES.items() if name in own}
        for inner, inner_value in value.items():
            if _name(inner) not in own:
                why = f"the section {key!r} has no such field"
                raise unknown_key(f"key in {path}", _name(inner), own, why=why, command="klamp train")
            entries.append((_name(inner), inner_value))
    return entries


def read_entry(key: str, value: object, path: Path) -> Any:
    """The value of a field from what stands in a YAML file.

    Args:
        key: the field's name or alias.
        value: a scalar, or a list where the field takes several values.
        path: the file, for messages.

    Raises:
        UnknownNameError: an unknown key, or an unknown choice; names the nearest.
        ConfigError: a value that cannot be read.
    """
    if key not in fields_by_any_name() or key in NOT_IN_FILES:
        why = "it is an option of the command line" if key in NOT_IN_FILES else "it is no field of the configuration"
        known = fields_by_any_name().keys() - set(NOT_IN_FILES)
        raise unknown_key(f"key in {path}", key, known, why=why, command="klamp train")
    field, shown = fields_by_any_name()[key], f"{key} in {path}"
    if isinstance(value, Mapping) or (value is None and not field.takes_none):
        raise ConfigError(
            f"{shown} cannot be read",
            got=repr(value),
            why=f"it takes {field.in_words}",
            fix="give it a value, or leave the line out",
        )
    each = value if isinstance(value, list | tuple) else [value]
    return read_value(field, [str(one) for one in each], shown=shown)


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _twice(key: str, path: Path, first: object, second: object) -> ConfigError:
    return ConfigError(
        f"{key} is given twice in {path}, with different values",
        got=f"{first!r} and {second!r}",
        why="it stands both flat and under its section",
        fix="keep one",
    )
