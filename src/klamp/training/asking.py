"""One question over HTTP, in JSON both ways, that is asked again where the server fails for a moment."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from klamp.errors import ConfigError

KEY = "KLAMP_REFERENCE_KEY"
"""The environment variable whose value is sent as a bearer token; it is in no message and no file of klamp's."""
TRIES = 4
TIMEOUT_SECONDS = 120.0
"""Longest silence of a server."""
LARGEST_ANSWER = 2**29
"""Bytes of an answer."""
FAILURES = (OSError, HTTPException, json.JSONDecodeError, UnicodeDecodeError)
"""What `ask` raises where no answer came: refusals and failures of the server, of the network, no JSON."""


def ask(url: str, content: dict[str, Any] | None = None) -> Any:
    """Ask a server: POST where there is something to say, else GET.

    Args:
        url: the address.
        content: what is sent as JSON.

    Raises:
        FAILURES: no answer; what the server refuses (status 400 to 499, or 501) is not asked again.
        ConfigError: the key in the environment is none.
    """
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if authorization := _bearer():
        request.add_unredirected_header("Authorization", authorization)
    for attempt in range(TRIES - 1):
        try:
            return _answer(request)
        except FAILURES as error:
            if status(error) in {*range(400, 500), 501} - {429}:
                raise
            time.sleep(0.1 * 2**attempt)
    return _answer(request)


def _answer(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            content = response.read(LARGEST_ANSWER + 1)
        if len(content) > LARGEST_ANSWER:
            raise HTTPException(f"the answer is larger than {LARGEST_ANSWER} bytes")
        return json.loads(content)
    except FAILURES:
        raise
    except (ValueError, RecursionError) as error:  # a redirection to no address; lists in lists without an end
        raise HTTPException(f"{type(error).__name__}: {error}") from error


def _bearer() -> str:
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY} is no key",
            why="a key that is sent over HTTP is printable ASCII on one line",
            fix="copy the key anew",
        )
    return key and f"Bearer {key}"


def status(error: BaseException) -> int | None:
    """The HTTP status of a failure; None: there was no answer."""
    return error.code if isinstance(error, HTTPError) else None


def reason(error: BaseException) -> str:
    """Why there is no answer, in one line: with what the server says to it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HTTPError):
        try:
            said = error.read(2000).decode(errors="replace")
        except FAILURES:
            said = ""
        text += f" {said}"
    plain = "".join(each if each.isprintable() else " " for each in text)  # a server may not write to the terminal
    return " ".join(plain.split())[:500]
