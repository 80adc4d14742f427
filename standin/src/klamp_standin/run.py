"""Starts the stand-in server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from klamp_standin.faults import Fault
from klamp_standin.server import Server
from klamp_standin.service import Service

NAME = "klamp/standin"
API_KEY = "tml-standin"


class Standin:
    """A running stand-in server, and counts of what it was asked."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """The address of the server: the SDK's `base_url`, or TINKER_BASE_URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def api_key(self) -> str:
        """An API key that the server accepts (any that starts with tml-)."""
        return API_KEY

    @property
    def base_model(self) -> str:
        """The name of the base model."""
        return self._server.service.name

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make the SDK use this server."""
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.api_key, "TINKER_TELEMETRY": "0"}

    @property
    def requests(self) -> Counter[str]:
        """The number of requests per route."""
        return self._server.requests

    @property
    def tokens(self) -> Counter[str]:
        """The number of tokens by use: `prompt` (read), `sampled`, `forward`, `forward_backward`."""
        return self._server.service.tokens

    def weights(self, run: str | None = None) -> dict[str, torch.Tensor]:
        """The LoRA tensors of a training run, with their gradients; None: those of the newest run."""
        runs = self._server.service.runs
        return runs[run or list(runs)[-1]].weights.tensors

    def inject(self, *faults: Fault) -> None:
        """Make these faults from now on, instead of any earlier ones."""
        self._server.plan.replace(faults)

    def die(self) -> None:
        """Answer no request any more."""
        self._server.die()


def tiny_model(vocabulary: int = 64, *, seed: int = 0) -> PreTrainedModel:
    """A Qwen3 model with two layers and random weights, in float32."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


@contextmanager
def serve(
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str = NAME,
    port: int = 0,
    seed: int = 0,
    folder: str | Path | None = None,
    faults: Sequence[Fault] = (),
) -> Iterator[Standin]:
    """A context in which a model is served to the Tinker SDK, on this machine only.

    Args:
        model: any causal LM on the CPU; None: `tiny_model` with the tokenizer's vocabulary, or 64 tokens.
        tokenizer: gives the end token, decodes for stop strings, and is what the SDK's `get_tokenizer` loads.
        name: what the model is called.
        port: 0 picks a free one.
        seed: of adapters and draws that come without one.
        folder: keeps checkpoints, so that another stand-in can go on from them; None: they end with this one.
        faults: what goes wrong.
    """
    model = tiny_model(64 if tokenizer is None else len(tokenizer), seed=seed) if model is None else model
    with TemporaryDirectory(prefix="klamp-standin-") as scratch:
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        service = Service(
            model,
            tokenizer,
            name=name,
            tokenizer_id=None if tokenizer is None else scratch,
            end=_end_tokens(model, tokenizer),
            seed=seed,
            folder=None if folder is None else Path(folder),
        )
        server = Server(service, faults, port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield Standin(server)
        finally:
            server.die()
            server.shutdown()
            server.server_close()
            service.worker.close()
            thread.join(timeout=30)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The ids that end a completion: the tokenizer's and the model's."""
    known: Any = None if tokenizer is None else tokenizer.eos_token_id
    settings = model.config if known is None else getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None)
    extra = given if isinstance(given, list) else [] if given is None else [given]
    return sorted({*([] if known is None else [int(known)]), *map(int, extra)})
