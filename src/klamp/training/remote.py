"""A reference on another machine, over a small HTTP protocol of klamp's own that carries log-probabilities.

One POST with JSON, one answer with JSON::

    {"prompts": [[ids]], "completions": [[ids]], "temperature": 1.0}   ->   {"logprobs": [[nats]]}

`serve` is a server of it for any causal LM; `RemoteReference` is its client. `klamp.training.vllm_reference` asks a
vLLM server instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError, ModelError
from klamp.training.asking import FAILURES, ask, reason
from klamp.training.completions import Completions
from klamp.training.scoring import Scores, score


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
        prompts = _rows(completions.prompt_ids, completions.prompt_mask)
        rows = self.logprobs(prompts, _rows(completions.ids, completions.mask), temperature=temperature)
        logprobs = torch.zeros(completions.ids.shape)
        logprobs[completions.mask.cpu()] = torch.tensor([x for row in rows for x in row], dtype=torch.float32)
        return Scores(logits=None, logprobs=logprobs.to(completions.ids.device))

    def logprobs(
        self, prompts: list[list[int]], completions: list[list[int]], *, temperature: float
    ) -> list[list[float]]:
        """The log-probability of every token of some completions, in nats.

        Args:
            prompts: the ids before each completion.
            completions: the ids that are scored.
            temperature: that of the sampler.

        Raises:
            ModelError: the server does not answer, or answers with something else than was asked.
        """
        rows = self.answer_to(prompts, completions, temperature=temperature)
        if not isinstance(rows, list) or [len(row) for row in rows] != [len(row) for row in completions]:
            raise self.failed("it returned log-probabilities of other lengths than the completions")
        return rows

    def answer_to(self, prompts: list[list[int]], completions: list[list[int]], *, temperature: float) -> Any:
        """What the server answers, unchecked."""
        try:
            answer = ask(self.url, {"prompts": prompts, "completions": completions, "temperature": temperature})
        except FAILURES as error:
            raise self.failed(reason(error)) from error
        return answer.get("logprobs") if isinstance(answer, dict) else None

    def failed(self, why: str) -> ModelError:
        """The error for a server that does not answer as it should."""
        return ModelError(
            "the remote reference does not answer as it should",
            got=self.url,
            why=why,
            fix="check that the server runs and serves the reference of this tokenizer; a run that had begun goes on "
            "with --resume",
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
