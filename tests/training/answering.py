"""Servers on the loopback that stand in for a remote reference."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Any, dict[str, str]], tuple[int, object]]
"""Path, what was sent (None: a GET) and the headers -> the status and what is answered; bytes as they are, and with
the status 302 the address of another server."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server that answers as it is told; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, asked: Any) -> None:
            status, content = answer(self.path, asked, dict(self.headers))
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", str(content))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def in_turn(*answers: tuple[int, object]) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives these answers, one after the other, then the last one for good; and what it was asked."""
    asked: list[Any] = []

    def answer(_: str, content: Any, __: dict[str, str]) -> tuple[int, object]:
        asked.append(content)
        return answers[min(len(asked), len(answers)) - 1]

    with answering(answer) as url:
        yield url, asked
