"""Servers on the loopback that stand in for a remote reference; what vLLM 0.32 answers, from a model that is here."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

Answer = Callable[[str, Any, dict[str, str]], tuple[int, object]]
"""Path, what was sent (None: a GET) and the headers -> the status and what is answered; bytes as they are, and with
the status 302 the address of another server."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
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

    with serving(Handler) as url:
        yield url


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server with a handler; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
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


@dataclass
class VLLMServer:
    """A stand-in; its `answer` is for `answering`."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, ...] = ("start",)  # the models that it lists
    key: str | None = None  # what it wants as a bearer token
    longest: int = 48  # its `max_model_len`
    texts: bool = True  # whether it takes texts
    scale: float = 1.0  # its numbers are those of the model times this
    without: bool = False  # whether it leaves prompt_logprobs out, as other servers do
    most: int = 20  # its `--max-logprobs`
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, asked: Any, headers: dict[str, str]) -> tuple[int, object]:
        if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/models" and asked is None:
            cards = [{"id": name, "max_model_len": self.longest, "parent": None} for name in self.names]
            return 200, {"object": "list", "data": cards}
        if path != "/v1/completions" or asked is None:
            return 404, {"detail": "Not Found"}
        self.asked.append(asked)
        if asked["model"] not in self.names:
            return 404, _error(f"The model `{asked['model']}` does not exist.")
        prompts = asked["prompt"]
        if isinstance(prompts[0], str):
            if not self.texts:
                return 400, _error("Unable to get tokenizer because `skip_tokenizer_init` is True")
            prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
        if max(map(len, prompts)) + asked["max_tokens"] > self.longest:
            return 400, _error(f"This model's maximum context length is {self.longest} tokens.")
        top = asked["prompt_logprobs"]
        if top > self.most:
            return 400, _error(f"Requested prompt logprobs of {top}, which is greater than max allowed: {self.most}")
        choices = [{"index": i, "prompt_logprobs": self.entries(ids, top)} for i, ids in enumerate(prompts)]
        return 200, {"choices": choices[::-1]}

    def entries(self, ids: list[int], top: int) -> list[dict[str, dict[str, Any]] | None] | None:
        if self.without:
            return None
        with torch.no_grad():
            rows = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return [None, *(self.entry(row, token, top) for row, token in zip(rows, ids[1:], strict=True))]

    def entry(self, row: torch.Tensor, token: int, top: int) -> dict[str, dict[str, Any]]:
        """The token itself, then the likeliest, each with its rank."""
        order = row.argsort(descending=True).tolist()
        listed = dict.fromkeys([token, *order[:top]])
        return {str(i): {"logprob": row[i].item() * self.scale, "rank": order.index(i) + 1} for i in listed}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
