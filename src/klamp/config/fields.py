"""What a field has besides its value: its range, its other names, its needs, its limits in hosts.

Checks, cautions, refusals of hosts, flags and their other names are made from it. The text under a field is its help.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from klamp.core.arguments import ANY, Numbers
from klamp.errors import ConfigError, Refusal, unknown_name


@dataclass(frozen=True)
class Need:
    """What gives a field its effect."""

    text: str
    """What to set, as the end of a sentence that begins with "it needs"."""
    is_met: Callable[[Any], bool]
    """Whether a configuration has it."""


def one_of(field: str, *values: object) -> Need:
    """The need of one of some values of another field."""
    *first, last = map(repr, values)
    text = f"{field}={' or '.join((', '.join(first), last)) if first else last}"
    return Need(text, lambda config: getattr(config, field) in values)


@dataclass(frozen=True)
class HostLimit:
    """Values of a field that hosts cannot honour."""

    hosts: tuple[str, ...]
    """The hosts: trl, unsloth, verl, tinker."""
    why: str
    """Why they cannot."""
    fix: str = ""
    """What to change; empty: leave the field unset."""
    values: tuple[object, ...] | None = None
    """The values; None: all but the default."""


def setting(
    default: Any,
    numbers: Numbers = ANY,
    *,
    needs: Sequence[Need] = (),
    limits: Sequence[HostLimit] = (),
    ignored_by: Sequence[str] = (),
    aliases: Sequence[str] = (),
    text: tuple[Any, str, Mapping[str, str]] | None = None,
) -> Any:
    """A field of a configuration.

    Args:
        default: its default.
        numbers: which numbers it takes.
        needs: what it needs to have an effect; the first need that is not met is the one that a caution names.
        limits: values that some hosts refuse.
        ignored_by: hosts that do not read it, and warn.
        aliases: its names in other trainers.
        text: the dataclass and its field that hold the text, and the words that are filled in; None: it has its own.
    """
    metadata = {"numbers": numbers, "needs": needs, "limits": limits, "ignored_by": ignored_by, "aliases": aliases}
    return dataclasses.field(default=default, metadata=metadata | {"text": text})


def like(owner: Any, name: str, words: Mapping[str, str] = MappingProxyType({}), **rest: Any) -> Any:
    """A field with default, numbers and text of another dataclass's field; `rest`: what differs, see `setting`."""
    source = owner.__dataclass_fields__[name]
    numbers = source.metadata.get("numbers", ANY)
    inherited: dict[str, Any] = {"default": source.default, "numbers": numbers, "text": (owner, name, words)}
    return setting(**inherited | rest)


def _changed(config: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            yield field, value


def without_effect(config: Any) -> list[str]:
    """A caution for each field that was changed and that nothing reads, with what it needs."""
    needs = {field.name: field.metadata.get("needs", ()) for field in fields(config)}
    missing = {name: [need.text for need in some if not need.is_met(config)] for name, some in needs.items()}
    return unread(config, {name: texts[0] for name, texts in missing.items() if texts})


def host_refusals(config: Any, host: str) -> list[Refusal]:
    """The values of a configuration that a host cannot honour; `host` as a person writes it: TRL, verl."""
    return [
        Refusal(
            limit.values is None or value in limit.values,
            f"{field.name}={value!r} cannot be honoured by {host}",
            why=limit.why,
            fix=limit.fix or f"leave {field.name} unset",
        )
        for field, value in _changed(config)
        for limit in field.metadata.get("limits", ())
        if host.lower() in limit.hosts
    ]


def ignored_fields(config: Any, host: str) -> list[str]:
    """The fields that were changed and that a host does not read."""
    return [field.name for field, _ in _changed(config) if host.lower() in field.metadata.get("ignored_by", ())]


def unread(config: Any, needs: Mapping[str, str]) -> list[str]:
    """A caution for each of these fields that was changed; `needs`: field -> what it needs to have an effect."""
    changed = {field.name: value for field, value in _changed(config)}
    return [f"{name}={changed[name]!r} has no effect: it needs {needs[name]}." for name in needs if name in changed]


# other names ----------------------------------------------------------------------------------------------------------


def aliases_of(cls: Any) -> dict[str, str]:
    """Other name -> field of a configuration."""
    return {alias: field.name for field in fields(cls) for alias in field.metadata.get("aliases", ())}


def resolve_aliases(values: Mapping[str, Any], names: set[str], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Configuration values under their proper names; refuses unknown ones, and two that differ."""
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in names:
            why = "the configuration has no such field"
            raise unknown_name("configuration key", key, names | aliases.keys(), why=why)
        if name in resolved and resolved[name] != value:
            raise ConfigError(
                f"{name} is given twice, with different values",
                got=f"{resolved[name]!r} and {value!r}",
                why=f"{', '.join(a for a, n in aliases.items() if n == name)} are other names of {name}",
                fix="keep one",
            )
        resolved[name] = value
    return resolved


Config = TypeVar("Config")


def accepts_aliases(cls: type[Config]) -> type[Config]:
    """Let the constructor of a configuration take other names of its fields, and nothing that is unknown."""
    init: Callable[..., None] = cls.__init__
    names, aliases = {field.name for field in fields(cast(Any, cls))}, aliases_of(cls)

    @functools.wraps(init)
    def __init__(self: Config, **values: Any) -> None:
        init(self, **resolve_aliases(values, names, aliases))

    setattr(cls, "__init__", __init__)  # noqa: B010  (a frozen dataclass class attribute, not an instance's)
    return cls


# addresses ------------------------------------------------------------------------------------------------------------


def check_server(url: str | None, field: str, *, key: str) -> None:
    """Refuse an invalid address of a server, and one with a user, password or query; the key comes from `key`."""
    _refuse_secrets(url, field, fix=f"write http://HOST:PORT; the server's key comes from {key}")
    if url is not None and not _is_sound(url):
        raise ConfigError(f"{field}={url!r} is no address", why="it is asked over HTTP", fix="write http://HOST:PORT")


def check_cluster(address: str | None, field: str) -> None:
    """Refuse a user, a password or a query in the address of a Ray cluster, which takes none."""
    fix = "write ray://HOST:10001, HOST:6379, auto or local, and a token into RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    _refuse_secrets(address, field, fix=fix)


def _refuse_secrets(address: str | None, field: str, *, fix: str) -> None:
    if set(address or "") & {"@", "?"}:
        what, got = f"{field} holds more than an address", "a text with an @ or a question mark, which is not shown"
        raise ConfigError(what, got=got, why="a configuration is shown, and written into the run's folder", fix=fix)


def _is_sound(url: str) -> bool:
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    try:
        parts = urlsplit(url)
        return plain and parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # raised by urlsplit for ports and IPv6
        return False
