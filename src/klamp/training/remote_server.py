"""A server of klamp's protocol for a reference on another machine: HTTP around a function that answers.

Whatever is sent, the client gets an answer that says why it is refused; nothing of it is logged or kept.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, NoReturn

from klamp.errors import ConfigError, DataError, without_credentials
from klamp.training.remote_protocol import LARGEST_QUESTION

Answering = Callable[[object], dict[str, Any]]
"""From what was asked to what is answered; raises a DataError for what is no question."""

SILENCE = 30.0
"""Longest wait for more of a request, in seconds."""
READ_ON = 10.0
"""Seconds that a client which was refused may go on sending: one that is cut off sees no answer."""


class _Refused(Exception):
    """Raised for a request that is not answered: with its status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Server(ThreadingHTTPServer):
    """The listening server, what answers behind it, and the token that it asks for."""

    def __init__(self, where: tuple[str, int], answering: Answering, token: str | None) -> None:
        self.answering, self.token = answering, token
        super().__init__(where, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    """Handles the request of one connection."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = SILENCE

    def do_POST(self) -> None:
        """Answer a question."""
        try:
            self._check_token()
            self._send(HTTPStatus.OK, self._answer(self._asked()))
        except _Refused as refused:
            self._send(refused.status, {"error": str(refused)})

    def _check_token(self) -> None:
        wanted = self.server.token
        given = self.headers.get("Authorization", "")
        if wanted is not None and not hmac.compare_digest(
            given.encode("utf-8", "replace"), f"Bearer {wanted}".encode()
        ):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "this server asks for a bearer token, and was sent none or another")

    def _asked(self) -> object:
        length = self._length()
        try:
            content = self.rfile.read(length)
        except TimeoutError:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"nothing more was sent for {SILENCE:g} seconds") from None
        if len(content) < length:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body ended after {len(content)} of {length} bytes")
        try:
            return json.loads(content, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {type(error).__name__}: {error}") from error

    def _length(self) -> int:
        given = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or not given:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a body is sent whole, with its Content-Length")
        text = given[0].strip()
        if len({*given}) > 1 or not (text.isascii() and text.isdigit()):
            raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length is no number of bytes")
        if len(text) > len(str(LARGEST_QUESTION)) or int(text) > LARGEST_QUESTION:
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {LARGEST_QUESTION} bytes: ask about fewer completions at once",
            )
        return int(text)

    def _answer(self, asked: object) -> dict[str, Any]:
        try:
            return self.server.answering(asked)
        except DataError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, " ".join(str(error).split())) from error
        except Exception as error:  # whatever it is, the client is told
            text = without_credentials(f"{type(error).__name__}: {error}")
            raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, " ".join(text.split())) from error

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no HTTP, or another method, as every refusal is answered: with a reason in JSON."""
        self.close_connection = True
        self._send(code, {"error": explain or message or HTTPStatus(code).phrase})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def finish(self) -> None:
        """Read on for a moment: the answer is lost to a client that still sends when the connection is closed."""
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1.0)
            until = time.monotonic() + READ_ON
            while time.monotonic() < until and self.connection.recv(2**16):
                pass

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the trainer reports what goes wrong."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


@contextmanager
def listening(answering: Answering, *, host: str, port: int, token: str | None) -> Iterator[str]:
    """A context in which a server answers questions; gives its URL.

    Args:
        answering: from what was asked to what is answered.
        host: the address to listen on.
        port: 0 picks a free one.
        token: what a client has to send as a bearer token; None: nothing.

    Raises:
        ConfigError: other machines reach the address and there is no token, or the token is none.
    """
    _check_door(host, token)
    server = _Server((host, port), answering, token)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{server.server_address[0]}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _check_door(host: str, token: str | None) -> None:
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ConfigError(
            "the token of the reference's server is none",
            why="a token that is sent over HTTP is printable ASCII on one line, without spaces around it",
            fix="token=secrets.token_urlsafe() makes one",
        )
    if token is None and not _is_loopback(host):
        raise ConfigError(
            "a reference's server that other machines reach asks for a token",
            got=f"host={host!r}, token=None",
            why="whoever reaches it could ask the model anything, and keep the machine busy",
            fix="pass token=..., which clients send from KLAMP_REFERENCE_KEY; or listen on 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name may stand for several."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, family=socket.AF_INET)
    except OSError:
        return False
    return all(ip_address(each[4][0]).is_loopback for each in found)
