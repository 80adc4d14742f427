"""The HTTP server of the stand-in: routes, faults, counts; reachable from this machine only."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from klamp_standin import samplers, training
from klamp_standin.faults import Fault, FaultPlan
from klamp_standin.protocol import PROTO, Refused
from klamp_standin.service import Body, Service

LONGEST_BODY = 2**28
"""Bytes of the largest body that is read."""
BODY_SECONDS = 30.0
"""How long the next piece of a body is waited for."""
HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.ASCII | re.IGNORECASE)
"""The names that this machine has for itself: a page in a browser here reaches the server under another one."""
WAIT_SECONDS = 5.0
"""How long a question for a future is held open before the client is told to ask again."""
CLIENT_CONFIG = {"use_pyqwest_transport": False}
"""What the SDK asks for first: its plain HTTP client."""
NOW: dict[str, Callable[[Service, Body], Body]] = {
    "client/config": lambda service, body: CLIENT_CONFIG,
    "client/dynamic_config": lambda service, body: {},
    "create_session": samplers.create_session,
    "session_heartbeat": lambda service, body: {"type": "session_heartbeat"},
    "telemetry": lambda service, body: {"status": "accepted"},
    "create_sampling_session": samplers.create_sampling_session,
    "get_info": training.get_info,
    "weights_info": training.weights_info,
    "cancel_future": lambda service, body: {},
}
"""The routes that are answered at once."""
LATER: dict[str, Callable[[Service, Any, Sequence[Fault]], Body]] = {
    "create_model": training.create_model,
    "load_weights": training.load_weights,
    "forward_backward": training.forward_backward,
    "optim_step": training.optim_step,
    "save_weights": training.save_weights,
    "save_weights_for_sampler": training.save_weights_for_sampler,
    "asample": samplers.asample,
}
"""The routes that are answered with a future."""


class Dropped(Exception):
    """Raised to close a connection without an answer."""


class Pending(Exception):
    """Raised where a result is not there yet: the client must ask again."""


class Server(ThreadingHTTPServer):
    """The listening server, with the service behind it and the faults it makes."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, service: Service, faults: Sequence[Fault], port: int) -> None:
        self.service, self.plan = service, FaultPlan(faults)
        self.requests: Counter[str] = Counter()
        self.dead = False
        self.open: set[socket.socket] = set()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def die(self) -> None:
        """Answer no request any more."""
        self.dead = True
        with self.lock:
            for connection in self.open:
                _close(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about clients that went away."""


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        """Remember the connection, so that a dying server can cut it."""
        super().setup()
        with self.server.lock:
            self.server.open.add(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        with self.server.lock:
            self.server.open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        """Answer health, capabilities and samplers."""
        self._answered(lambda path, raw: self._get(path))

    def do_POST(self) -> None:
        """Answer everything else."""
        self._answered(self._post)

    def _answered(self, act: Callable[[str, bytes], Body | bytes]) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/v1/")
        try:
            if self.server.dead:
                raise Dropped
            raw = self._body()
            self.server.requests[path.split("/")[0] if path.startswith("samplers/") else path] += 1
            if not (self.headers.get("X-API-Key") or "").startswith("tml-"):
                raise Refused("the X-API-Key header is missing or does not start with 'tml-'", status=401)
            self._send(200, act(path, raw))
        except Dropped:
            self.close_connection = True
            _close(self.connection)
        except Pending as error:
            self._send(408, {"type": "try_again", "request_id": str(error), "queue_state": "active"})
        except Refused as error:
            self._send(error.status, {"error": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, {"error": f"the request does not fit {path}: {type(error).__name__}: {error}"})
        except Exception as error:  # whatever it is, the client is told
            self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def _body(self) -> bytes:
        """Read the body of a request that is meant for this server and says how long it is; else close the connection.

        Raises:
            Refused: it is not, or does not, or is too long.
            Dropped: the whole of it did not come.
        """
        self.close_connection, kept = True, self.close_connection
        host, length = self.headers.get("Host") or "", self.headers.get("Content-Length") or "0"
        if not HERE.fullmatch(host):
            raise Refused(f"the stand-in is 127.0.0.1 or localhost, and was asked as {host!r}", status=403)
        if "Transfer-Encoding" in self.headers or not re.fullmatch("[0-9]{1,18}", length):
            raise Refused(f"the body needs a Content-Length, and has {length!r}", status=411)
        if int(length) > LONGEST_BODY:
            raise Refused(f"a body of {length} bytes; {LONGEST_BODY} are read", status=413)
        raw = b""
        self.connection.settimeout(BODY_SECONDS)
        with contextlib.suppress(OSError):
            raw = self.rfile.read(int(length))
        self.connection.settimeout(None)
        if len(raw) < int(length):
            raise Dropped
        self.close_connection = kept
        return raw

    def _get(self, path: str) -> Body:
        if path == "healthz":
            return {"status": "ok"}
        if path == "get_server_capabilities":
            base = self.server.service.base
            model = {"model_name": self.server.service.name, "max_context_length": base.longest}
            return {"supported_models": [model | {"trainable": True, "sampleable": True}]}
        if path.startswith("samplers/"):
            return samplers.get_sampler(self.server.service, path.removeprefix("samplers/"))
        raise Refused(f"the stand-in has no GET {path}", status=404)

    def _post(self, path: str, raw: bytes) -> Body | bytes:
        if path == "forward_backward" and self.headers.get("Content-Type") != PROTO:
            raise Refused(f"forward_backward takes {PROTO}", status=415)
        body: Any = raw if path == "forward_backward" else json.loads(raw or b"{}")
        if path == "retrieve_future":
            return self._retrieve(body["request_id"])
        faults = self.server.plan.strike(path, scoring=path == "asample" and samplers.scores_prompt(body))
        self._strike(faults, later=path in LATER)
        if path in LATER:
            return LATER[path](self.server.service, body, faults)
        if path in NOW:
            return NOW[path](self.server.service, body)
        if path.startswith("sessions/") and path.endswith("/finish"):
            return {}
        raise Refused(f"the stand-in has no POST {path}", status=404)

    def _strike(self, faults: Sequence[Fault], *, later: bool) -> None:
        for fault in faults:
            if fault.kind == "die":
                self.server.die()
            if fault.kind in ("die", "drop"):
                raise Dropped
            if fault.kind == "status":
                raise Refused("a fault was asked for", status=fault.status)
            if fault.kind == "slow" and not later:
                time.sleep(fault.seconds)

    def _retrieve(self, request_id: str) -> Body | bytes:
        result = self.server.service.worker.wait(request_id, WAIT_SECONDS)
        if self.server.dead:
            raise Dropped
        if result is None:
            raise Pending(request_id)
        return result

    def _send(self, status: int, content: Body | bytes) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", PROTO if isinstance(content, bytes) else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the client reports what goes wrong."""


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
