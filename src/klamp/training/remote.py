"""A reference on another machine, over a small HTTP protocol that carries log-probabilities.

One POST with JSON, one answer with JSON::

    {"prompts": [[ids]], "completions": [[ids]], "temperature": 1.0}   ->   {"logprobs": [[nats]]}

`serve` is a server of it for any causal LM; `RemoteReference` is its client.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError, ModelError
from klamp.training.completions import Completions
from klamp.training.scoring import Scores, score

TRIES = 4
TIMEOUT_SECONDS = 120.0


def _rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


class RemoteReference:
    """A reference that answers over HTTP: log-probabilities of tokens, no logits.

    Args:
        url: where the server listens.

    Raises:
        ModelError: in `score`, the server does not answer, or answers with something else than was asked.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """Ask the remote model for the log-probabilities of the completions."""
        asked = {
            "prompts": _rows(completions.prompt_ids, completions.prompt_mask),
            "completions": _rows(completions.ids, completions.mask),
            "temperature": temperature,
        }
        answer = self._post(asked).get("logprobs")
        lengths = [len(row) for row in asked["completions"]]
        if not isinstance(answer, list) or [len(row) for row in answer] != lengths:
            raise self._failed("it returned log-probabilities of other lengths than the completions")
        logprobs = torch.zeros(completions.ids.shape)
        logprobs[completions.mask.cpu()] = torch.tensor([x for row in answer for x in row], dtype=torch.float32)
        return Scores(logits=None, logprobs=logprobs.to(completions.ids.device))

    def _post(self, content: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"}
        )
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                    return json.loads(response.read())
            except (OSError, json.JSONDecodeError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or attempt == TRIES - 1:
                    raise self._failed(f"{type(error).__name__}: {error}") from error
                time.sleep(0.1 * 2**attempt)
        raise self._failed("no answer")

    def _failed(self, why: str) -> ModelError:
        return ModelError(
            "the remote reference does not answer as it should",
            got=self.url,
            why=why,
            fix="check that the server runs and serves the reference of this tokenizer; then continue with --resume",
        )

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """Refuse: a remote reference cannot generate.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the reference length cannot be measured with a remote reference",
            got=self.url,
            why="the remote protocol scores tokens, it does not sample them",
            fix="set kl_reference_length, or give it as a data column",
        )
        yield

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Does nothing: the remote model never moves."""

    def weights(self) -> nn.Module | None:
        """None: the weights are on the other machine."""
        return None

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        return f"a remote model at {self.url}"


def _padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    width = max(1, *map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = torch.tensor(row, dtype=torch.long), True
    return ids, mask


def answer(model: nn.Module, asked: dict[str, Any]) -> dict[str, Any]:
    """The server's side of the protocol: the log-probabilities of the completions under a model."""
    prompt_ids, prompt_mask = _padded(asked["prompts"], left=True)
    ids, mask = _padded(asked["completions"], left=False)
    completions = Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask.long(),
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(ids.shape),
        ended=torch.ones(len(ids), dtype=torch.bool),
    )
    with torch.no_grad():
        scores = score(model, completions, temperature=float(asked.get("temperature", 1.0)))
    return {"logprobs": [row[kept].tolist() for row, kept in zip(scores.logprobs, mask, strict=True)]}


def serve(model: nn.Module, *, host: str = "127.0.0.1", port: int = 0) -> AbstractContextManager[str]:
    """A context in which a reference is served; gives its URL.

    Args:
        model: any causal LM, on the CPU.
        host: the address to listen on.
        port: 0 picks a free one.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, content = 200, answer(model, asked)
            except (KeyError, TypeError, ValueError) as error:
                status, content = 400, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the trainer reports what goes wrong."""

    return _served(ThreadingHTTPServer((host, port), Handler))


@contextmanager
def _served(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{server.server_address[0]}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
