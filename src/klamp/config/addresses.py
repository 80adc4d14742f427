"""Addresses of servers in a configuration, whose credentials are used and never shown."""

from __future__ import annotations

from base64 import b64encode
from urllib.parse import unquote, urlsplit, urlunsplit

from klamp.errors import ConfigError


class Address(str):
    """A URL that is shown, compared and written without user, password and query; a request has them.

    As a text it is the URL without them, so that no file, tracker or message can hold what it does not see.

    Args:
        url: the URL; an address stays as it is.
        field: the name of the field that it stands in.

    Raises:
        ConfigError: it is no http or https URL.
    """

    user: str
    """USER:PASSWORD, or a user alone, as they stand in the URL; "" where there is none."""
    query: str
    """What stands after the question mark."""

    def __new__(cls, url: str, field: str = "url") -> Address:
        if isinstance(url, Address):
            return url
        if not _is_sound(url):
            shown = url.rpartition("@")[2].partition("?")[0]
            raise ConfigError(
                f"{field}={shown!r} is no address",
                got="a text with an @: what stands before it is not shown" if "@" in url else None,
                why="the server is asked over HTTP",
                fix="write http://HOST:PORT; in a password, %2F, %3F, %23 and %40 stand for / ? # and @",
            )
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        address = super().__new__(cls, urlunsplit((parts.scheme, host, parts.path, "", "")))
        address.user, address.query = user, parts.query
        return address

    def beside(self, url: str) -> Address:
        """Another address of the same server: with the credentials of this one."""
        address = Address(url)
        address.user, address.query = self.user, self.query
        return address

    @property
    def asked(self) -> str:
        """The URL of a request, which `authorization` goes with."""
        return f"{self}?{self.query}" if self.query else str(self)

    @property
    def authorization(self) -> str | None:
        """The header of HTTP's Basic authentication; None: no user was given."""
        if not self.user:
            return None
        user, _, password = self.user.partition(":")
        return "Basic " + b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()

    @property
    def whole(self) -> str:
        """The URL with all that is not shown: for whom it is meant, and for nobody else."""
        parts = urlsplit(self.asked)
        return urlunsplit(parts._replace(netloc=f"{self.user}@{parts.netloc}" if self.user else parts.netloc))

    @property
    def has_secrets(self) -> bool:
        """Whether there is anything that is not shown."""
        return bool(self.user or self.query)


def _is_sound(url: str) -> bool:
    try:
        parts = urlsplit(url)
        in_range = parts.port is None or parts.port > 0
    except ValueError:  # what urlsplit says of ports and of IPv6
        return False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    return plain and in_range and parts.scheme in ("http", "https") and bool(parts.hostname)


def settled(config: object, field: str) -> None:
    """Make a field of a frozen configuration, where it is set, an `Address`.

    Raises:
        ConfigError: it is none.
    """
    url = getattr(config, field)
    if url is not None:
        object.__setattr__(config, field, Address(url, field))


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
