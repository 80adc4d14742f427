"""`klamp report RUN --follow`: the report of runs that go on, on a page of this machine that loads itself again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from klamp.errors import KlampError

HOST = "127.0.0.1"
"""The loopback: no other machine reaches it."""
NAMES = (HOST, "localhost")
"""Names by which a browser may ask; another one is a page elsewhere whose name was bound to this machine."""

Signature = tuple[tuple[str, int, int], ...]


class Followed:
    """The page of records that grow, rendered again when their files have changed.

    Args:
        paths: files and folders that the page is made from.
        render: makes the page, given its version.
        tell: is told, once, why a page could not be made; the one before it stays.
    """

    def __init__(self, paths: Sequence[Path], render: Callable[[str], str], tell: Callable[[str], None]) -> None:
        self._paths, self._render, self._tell = paths, render, tell
        self._lock = threading.Lock()
        self._said = ""
        self._number = 1
        self._seen = signature(paths)
        self._page = render("1")

    def current(self) -> tuple[str, str]:
        """The version and the page, as the files are now."""
        with self._lock:
            seen = signature(self._paths)
            if seen != self._seen:
                try:
                    self._page = self._render(str(self._number + 1))
                    self._number, self._said = self._number + 1, ""
                except (KlampError, OSError) as error:  # half a file: the next time it may be whole
                    if str(error) != self._said:
                        self._said = str(error)
                        self._tell(self._said)
                self._seen = seen
            return str(self._number), self._page


def signature(paths: Sequence[Path]) -> Signature:
    """The names, sizes and times of the files; pages that klamp wrote beside them do not count."""
    found: list[tuple[str, int, int]] = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                state = file.stat()
            except OSError:  # it is gone again
                continue
            if file.is_file() and file.suffix != ".html":
                found.append((str(file), state.st_size, state.st_mtime_ns))
    return tuple(found)


def server_of(followed: Followed) -> ThreadingHTTPServer:
    """A server of the page, on a free port of the loopback; it answers `/` and `/version`.

    Args:
        followed: what it serves.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = (self.headers.get("Host") or "").rpartition(":")[0]
            if name not in NAMES:
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path == "/":
                self._answer(followed.current()[1], "text/html")
            elif self.path == "/version":
                self._answer(followed.current()[0], "text/plain")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a page asks every two seconds."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server
