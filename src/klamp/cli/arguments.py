"""From a command line and a YAML file to a configuration: defaults or a resumed run's < preset < file < flags."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from klamp.cli.commands import BaseOptions, TrainOptions, read_command
from klamp.cli.flags import configured_fields, fields_of, read_argv
from klamp.config import find_preset
from klamp.doctor.readers.klamp_run import HISTORY
from klamp.errors import ConfigError, brief
from klamp.files import at_home, with_end, yaml_of
from klamp.lab.config import TrainConfig, section_classes
from klamp.names import CONFIG, HINTS, VERL_ESTIMATORS

FORM = "one `name: value` per line, for example `beta: 0.01`"


def parse_train(argv: Sequence[str]) -> tuple[TrainConfig, TrainOptions]:
    """The configuration that a command line describes, and the options of `klamp train` itself."""
    options, flags = read_command("train", argv)
    return config_of(with_file(options, flags), output_dir=flags.get("output_dir")), options


def with_file(options: BaseOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags, and the preset, on top of the fields of the file that --config names."""
    file = {} if options.config is None else read_file(options.config)
    return file | ({} if options.preset is None else {"preset": options.preset}) | dict(flags)


def config_of(values: Mapping[str, Any], *, output_dir: str | None = None) -> TrainConfig:
    """The configuration of some fields and perhaps a preset; `output_dir`: a flag's."""
    values = dict(values)
    if isinstance(folder := values.get("resume"), str):
        if at_home(output_dir or folder) != at_home(folder):
            got, fix = f"--resume {folder} --output_dir {output_dir}", "leave --output_dir out"
            raise ConfigError("two folders are named", got=got, why="a run continues in its own folder", fix=fix)
        values |= {"resume": True, "output_dir": folder}
    own = at_home(values.get("output_dir") or "") / CONFIG
    base = read_file(own) if values.get("resume") and values.get("output_dir") and own.is_file() else {}
    return TrainConfig.from_flat(base | preset_values(values.pop("preset", None)) | values)


def preset_values(name: str | None) -> dict[str, Any]:
    """The KL and loss fields in which a recipe differs from the defaults, and its beta; without a name, none."""
    if name is None:
        return {}
    preset, defaults = find_preset(name), TrainConfig().flat()
    recipe = {**dataclasses.asdict(preset.kl), **dataclasses.asdict(preset.loss)}
    return {field: value for field, value in recipe.items() if value != defaults[field] or field == "beta"}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a repeated key instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is repeated", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_file(path: str | Path) -> dict[str, Any]:
    """The fields that a YAML file sets; its keys are the flags' names, flat or under their section."""
    return read_entries(load_yaml(at_home(path)), at_home(path))


def read_entries(content: Mapping[Any, Any], path: Path, several: Collection[str] = ()) -> dict[str, Any]:
    """The fields that a mapping of a YAML file sets, read as flags would be; a note of a ConfigError names the file."""
    fields = {"preset": fields_of(TrainOptions)["preset"], **configured_fields()}
    names = {name: field.name for field in fields.values() for name in (field.name, *field.aliases)}
    words, names_read = list[str](), set[str]()
    try:
        _refuse_other_trainers(content, names)
        for key, value in _flat(content):
            flag, values = str(key).replace("-", "_"), value if isinstance(value, list) else [value]
            if names.get(flag) in names_read or any(isinstance(item, Mapping | list) for item in values):
                why = "a field has one name, and a value or a list of values"
                raise ConfigError(f"{flag} cannot be read", got=repr(value), why=why, fix="write it once")
            texts = ["null" if item is None else str(item) for item in values]
            words += [f"--{flag}={texts[0]}"] if len(texts) == 1 else [f"--{flag}", *texts]
            names_read.add(names.get(flag, flag))
        return read_argv(fields, words, command="klamp train", several=several)
    except ConfigError as error:
        error.add_note(f"in {path}")
        raise


def _flat(content: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The entries of a file without its sections, and without the former steps of a run in its own file."""
    for key, value in content.items():
        if key in section_classes() and isinstance(value, Mapping):
            yield from value.items()
        elif key != HISTORY:
            yield key, value


def _refuse_other_trainers(content: Mapping[Any, Any], known: Collection[str]) -> None:
    """Refuse a file with several unknown fields, with klamp's name of each that is known elsewhere or misspelled."""
    unknown = {name: str(value) for name, value in _leaves(content) if name not in known}
    cutoff = 1.0 if any(isinstance(value, Mapping) for _, value in _flat(content)) else 0.85
    named: list[str] = []
    for name, value in unknown.items():
        nearest = [HINTS[name]] if name in HINTS else get_close_matches(name, known, n=1, cutoff=cutoff)
        meant, said = (f"={VERL_ESTIMATORS[value]}", f"={value}") if value in VERL_ESTIMATORS else ("", "")
        named += [f"{ours}{meant} for {name}{said}" for ours in nearest]
    if len(unknown) > 1:
        why = "klamp train has no such fields: they are of another trainer, of an older klamp, or misspelled"
        fix = f"write {', '.join(named) or 'fields of klamp'}; `klamp train --help` lists all"
        raise ConfigError("unknown fields", got=", ".join(unknown), why=why, fix=fix)


def _leaves(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(content):
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(key).replace("-", "_"), value


def load_yaml(path: Path) -> Mapping[Any, Any]:
    """The mapping that a YAML file holds; a ConfigError if there is no such file, no valid YAML, or no mapping."""
    what = "the configuration file cannot be read"
    try:
        content = yaml_of(with_end(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(what, got=str(path), why=reason, fix="give the path of a YAML file") from error
    except ValueError as error:
        raise ConfigError(what, got=str(path), why=f"not valid YAML: {brief(str(error))}", fix=FORM) from error
    return mapping_of(content, f"the configuration file {path}")


def mapping_of(content: object, what: str) -> Mapping[Any, Any]:
    """The mapping in a part of a YAML file; nothing is an empty mapping, and anything else a ConfigError."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        got, why = f"{type(content).__name__}: {brief(repr(content))}", "each value belongs to a field"
        raise ConfigError(f"{what} holds no names", got=got, why=why, fix=FORM)
    return content
