"""Addresses of servers and clusters in a configuration, which is shown and kept: without user, password and query."""

from __future__ import annotations

from urllib.parse import urlsplit

from klamp.errors import ConfigError


def check_server(url: str | None, field: str, *, key: str) -> None:
    """Refuse what is no address of a server, and one with a user, a password or a query.

    Args:
        url: the address; None: there is none.
        field: the name of the field that it stands in.
        key: where the server's client takes a key from.

    Raises:
        ConfigError: it is no http or https URL, or more than one.
    """
    if url is None:
        return
    if set(url) & {"@", "?"}:
        raise ConfigError(
            f"{field} holds more than the address of a server",
            got="a text with an @ or a question mark, which is not shown",
            why="a configuration is shown, and written into the run's folder",
            fix=f"write http://HOST:PORT; what the server wants to know of you comes from {key}",
        )
    if not _is_sound(url):
        raise ConfigError(
            f"{field}={url!r} is no address",
            why="the server is asked over HTTP",
            fix="write http://HOST:PORT",
        )


def _is_sound(url: str) -> bool:
    try:
        parts = urlsplit(url)
        in_range = parts.port is None or parts.port > 0
    except ValueError:  # what urlsplit says of ports and of IPv6
        return False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    return plain and in_range and parts.scheme in ("http", "https") and bool(parts.hostname)


def check_cluster(address: str | None, field: str) -> None:
    """Refuse a user, a password or a query in the address of a Ray cluster: Ray takes none, and klamp would show them.

    Args:
        address: as Ray has it; None: there is none.
        field: the name of the field that it stands in.

    Raises:
        ConfigError: there is one.
    """
    if address is not None and set(address) & {"@", "?"}:
        raise ConfigError(
            f"{field} holds more than the address of a cluster",
            got="a text with an @ or a question mark, which is not shown",
            why="Ray takes no user, no password and no query there",
            fix="write ray://HOST:10001, HOST:6379, auto or local; a cluster that asks for a token gets it from "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        )
