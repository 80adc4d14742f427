"""A reference on another machine, over a small HTTP protocol of klamp's own that carries log-probabilities.

`klamp.training.remote_protocol` says what a question and an answer are. `serve` is a server of it for any causal LM;
`RemoteReference` is its client. `klamp.training.vllm_reference` asks a vLLM server instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from klamp.config.addresses import Address
from klamp.errors import ConfigError, ModelError
from klamp.scoring.completions import Completions
from klamp.scoring.scores import Scores, score
from klamp.training.asking import FAILURES, ask, reason
from klamp.training.models import input_size, output_size
from klamp.training.remote_protocol import fault_of, question_of
from klamp.training.remote_server import listening


def _rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


class RemoteReference:
    """A reference that answers over HTTP: log-probabilities of tokens, no logits.

    Args:
        url: where the server listens; a user and a password before the host are sent to it, and shown nowhere.

    Raises:
        ConfigError: no http or https URL.
        ModelError: in `score`, the server does not answer, or answers with something else than was asked.
    """

    def __init__(self, url: str) -> None:
        self.url = Address(url)

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
        if fault := fault_of(rows, completions):
            raise self.failed(fault)
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


def answer(model: nn.Module, asked: object) -> dict[str, Any]:
    """The server's side of the protocol: the log-probabilities of the completions under a model.

    Raises:
        DataError: what was asked is no question, or none for this model.
        ModelError: the model returns numbers that are not finite.
    """
    inner: Any = getattr(model, "module", model)
    longest = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    vocabulary = min(output_size(inner), input_size(inner))
    prompts, rows, temperature = question_of(asked, vocabulary=vocabulary, longest=longest)
    if not rows:
        return {"logprobs": []}
    prompt_ids, prompt_mask = _padded(prompts, left=True)
    ids, mask = _padded(rows, left=False)
    completions = Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask.long(),
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(ids.shape),
        ended=torch.ones(len(ids), dtype=torch.bool),
    )
    with torch.no_grad():
        scores = score(model, completions, temperature=temperature)
    if not scores.logprobs[mask].isfinite().all():
        raise ModelError("the model returned log-probabilities that are not finite", got=f"temperature={temperature:g}")
    return {"logprobs": [row[kept].tolist() for row, kept in zip(scores.logprobs, mask, strict=True)]}


def serve(
    model: nn.Module, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AbstractContextManager[str]:
    """A context in which a reference is served; gives its URL.

    Args:
        model: any causal LM, on the CPU.
        host: the address to listen on.
        port: 0 picks a free one.
        token: what a client has to send as a bearer token (klamp does so from `KLAMP_REFERENCE_KEY`); None: nothing.

    Raises:
        ConfigError: other machines reach the address and there is no token, or the token is none.
    """
    return listening(partial(answer, model), host=host, port=port, token=token)
