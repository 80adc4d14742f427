"""A reference on a vLLM server, or on any that speaks OpenAI's protocol and returns log-probabilities of prompts.

A sequence is sent to `/v1/completions` as a prompt of token ids with `prompt_logprobs=0`; its numbers come back with
their ids, one token is generated and thrown away. The numbers are those of the model itself: no temperature, penalty or
truncation of a request or of the server's defaults enters them.

`connect` tells such a server from one of klamp's own protocol, and checks either before any work.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.config.addresses import Address
from klamp.errors import ConfigError, DataError, KLWarning, ModelError, unknown_name
from klamp.tasks import check_prompts
from klamp.tasks.base import Task
from klamp.training.asking import FAILURES, KEY, ask, reason, status
from klamp.training.config import TrainConfig
from klamp.training.remote import RemoteReference
from klamp.training.remote_protocol import is_logprob

AT_ONCE = 32
"""Sequences in a request: the server batches them, and the answer stays within megabytes."""
CONCURRENT = 4
"""Requests under way."""
PROBES = 8
"""Prompts whose tokens are compared."""
NO_SUCH_PAGE = (400, 404, 405, 415, 422, 501)
"""How servers that know no list of models answer to the question for it."""

Entry = dict[str, dict[str, Any]] | None
"""What a server says of one position: the token's id -> its log-probability; of the first position nothing."""


class VLLMReference(RemoteReference):
    """A reference that a vLLM server scores.

    Equation: log softmax(logits) at each token of the completion; temperature 1 only.

    Args:
        url: where the server listens, without `/v1`.
        name: the model's name at the server.

    Raises:
        ModelError: in `score`, the server does not answer, or answers with something else than was asked.
        ConfigError: in `score`, the temperature is not 1.
    """

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self.name = name

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        return f"{self.name} on the server at {self.url}"

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature at which the server cannot score.

        Raises:
            ConfigError: it is not 1.
        """
        if temperature != 1:
            raise ConfigError(
                "a vLLM server scores at temperature 1 only",
                got=f"temperature={temperature:g}, reference_url={self.url}",
                why="klamp compares policy and reference at the sampling temperature, and vLLM returns the "
                "log-probabilities of prompts before any temperature: their difference is not 0 even between "
                "equal models (.34 nats per token were measured at temperature .6)",
                fix="set temperature=1, or serve the reference with klamp.training.remote.serve, or keep it on this "
                "machine (reference='frozen')",
            )

    def answer_to(
        self, prompts: list[list[int]], completions: list[list[int]], *, temperature: float
    ) -> list[list[float]]:
        """The server's log-probabilities of the completions, each in nats."""
        self.check_temperature(temperature)
        sequences = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        parts = [sequences[start : start + AT_ONCE] for start in range(0, len(sequences), AT_ONCE)]
        with ThreadPoolExecutor(CONCURRENT) as pool:
            rows = [row for part in pool.map(self._scored, parts) for row in part]
        return [row[len(row) - len(tokens) :] for row, tokens in zip(rows, completions, strict=True)]

    def _scored(self, sequences: list[list[int]]) -> list[list[float]]:
        """The log-probabilities of all tokens but the first of each sequence."""
        try:
            found = self.entries(sequences)
        except FAILURES as error:
            raise self.failed(reason(error)) from error
        return [self._numbers(ids, entries) for ids, entries in zip(sequences, found, strict=True)]

    def entries(self, prompts: Sequence[list[int]] | Sequence[str]) -> list[list[Entry]]:
        """What the server says of every position of some prompts, given as ids or as texts.

        Raises:
            FAILURES: the server does not answer, or refuses.
            ModelError: it answers something else.
        """
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "add_special_tokens": False}
        url = self.url.beside(f"{self.url}/v1/completions")
        answer = ask(url, {"model": self.name, "prompt": list(prompts), **settings})
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            found = [choice.get("prompt_logprobs") for choice in choices]
        except (KeyError, TypeError, AttributeError) as error:
            raise self.failed("it does not answer as /v1/completions does") from error
        if len(found) != len(prompts) or not all(isinstance(each, list) and each for each in found):
            raise self.failed(
                "it returned no log-probabilities of the prompts: it has to know prompt_logprobs, as vLLM does"
            )
        return found

    def _numbers(self, ids: list[int], entries: list[Entry]) -> list[float]:
        try:
            pairs = zip(ids[1:], entries[1:], strict=True)
            numbers = [(entry or {})[str(token)]["logprob"] for token, entry in pairs]
            if not all(isinstance(number, int | float) for number in numbers):
                raise TypeError("no number")
        except (KeyError, TypeError, ValueError) as error:
            raise self.failed("it returned numbers of other tokens than those that it was sent") from error
        if not all(map(is_logprob, numbers)):
            other = str(next(number for number in numbers if not is_logprob(number)))[:20]
            raise self.failed(
                f"it returned numbers that are no log-probabilities ({other} is one of them): vLLM does so "
                "with --logprobs-mode raw_logits or processed_logits; start it with raw_logprobs, its default"
            )
        return numbers


def connect(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> RemoteReference:
    """The reference that answers at `reference_url`, found to fit the run.

    Args:
        config: of the run.
        task: its prompts.
        tokenizer: of its policy.

    Raises:
        ModelError: the server does not answer, has no such model, returns no log-probabilities, takes only shorter
            sequences, or has another tokenizer.
        ConfigError: a name or a temperature that the server cannot honour.
    """
    url = Address(config.kl.reference_url or "", "reference_url")
    cards = _cards(url)
    reference = _own(config, url) if cards is None else _served(config, url, cards)
    if isinstance(reference, VLLMReference) and cards is not None:
        _check_lengths(config, task, tokenizer, reference, cards)
    prompts = [example.prompt for example in task.train[:PROBES]]
    ids: Any = tokenizer(prompts[0], add_special_tokens=False)["input_ids"]
    reference.logprobs([ids], [[tokenizer.eos_token_id]], temperature=config.rollout.temperature)  # pyright: ignore
    if isinstance(reference, VLLMReference):
        _check_tokenizer(reference, tokenizer, prompts)
    return reference


def _cards(url: Address) -> dict[str, dict[str, Any]] | None:
    """What a server says of its models, by name; None where it lists none: it is one of klamp's own protocol."""
    try:
        answer = ask(url.beside(f"{_root(url)}/v1/models"))
    except FAILURES as error:
        if status(error) in NO_SUCH_PAGE:
            return None
        key = f" (the key is what the environment variable {KEY} holds, or a user and a password before the host in "
        key = f"{key}reference_url, which no file of a run keeps)" if status(error) in (401, 403) else ""
        raise RemoteReference(url).failed(reason(error) + key) from error
    found = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(card, dict) and _is_card(card) for card in found):
        return None
    return {card["id"]: card for card in found}


def _is_card(card: dict[str, Any]) -> bool:
    longest, parent = card.get("max_model_len"), card.get("parent")
    known = longest is None or (type(longest) is int and longest > 0)
    return isinstance(card.get("id"), str) and known and (parent is None or isinstance(parent, str))


def _root(url: Address) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _own(config: TrainConfig, url: Address) -> RemoteReference:
    """The reference on a server of klamp's own protocol."""
    if config.kl.reference_name is not None:
        raise ConfigError(
            "reference_name is for a server that lists its models, as vLLM does",
            got=f"reference_name={config.kl.reference_name!r}, reference_url={url!r}",
            why=f"there is no such list at {_root(url)}/v1/models; a server of klamp's own protocol has one model",
            fix="leave reference_name out, or check the address",
        )
    return RemoteReference(url)


def _served(config: TrainConfig, url: Address, cards: dict[str, dict[str, Any]]) -> VLLMReference:
    """The reference on a vLLM server, by its name there."""
    reference = VLLMReference(url.beside(_root(url)), _name(config, cards))
    reference.check_temperature(config.rollout.temperature)
    return reference


def _name(config: TrainConfig, cards: dict[str, dict[str, Any]]) -> str:
    asked = config.kl.reference_name
    if asked is None and len(cards) == 1:
        return next(iter(cards))
    if asked is None:
        raise ConfigError(
            "the reference's server serves several models" if cards else "the reference's server serves no model",
            got=f"reference_url={config.kl.reference_url!r}",
            why=f"it names {', '.join(sorted(cards)) or 'none'}",
            fix="set reference_name to one of them" if cards else "start it with a model",
        )
    if asked not in cards:
        raise unknown_name("model of the reference's server", asked, cards)
    return asked


def _check_lengths(
    config: TrainConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    reference: VLLMReference,
    cards: dict[str, dict[str, Any]],
) -> None:
    """Refuse a server that takes only shorter sequences than the run may have."""
    card = cards[reference.name]
    longest = card.get("max_model_len") or cards.get(card.get("parent") or "", {}).get("max_model_len")
    if longest is None:
        return
    try:  # the server generates one token after each sequence
        check_prompts(task.train, tokenizer, int(longest) - 1, config.rollout.max_completion_length)
    except DataError as error:
        raise ModelError(
            "the reference's server takes only shorter sequences than this run may have",
            got=f"max_model_len={longest} at {reference.url}, max_completion_length="
            f"{config.rollout.max_completion_length}",
            why=f"{error.what}; one token more is generated after each sequence",
            fix="start the server with a larger --max-model-len, or shorten prompts or completions",
        ) from error


def _check_tokenizer(reference: VLLMReference, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> None:
    """Refuse a server whose tokens are not the policy's; the first id of a prompt is not told, and not compared."""
    texts = [prompt + str(tokenizer.eos_token) for prompt in prompts]
    ours = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    try:
        found = reference.entries(texts)
        theirs = [[int(next(iter(entry or {}))) for entry in entries[1:]] for entries in found]
    except FAILURES as error:
        warnings.warn(
            f"The server at {reference.url} scores tokens and takes no texts ({reason(error)}): whether its tokenizer "
            "is the policy's is not known. The KL before the first update shows it, which should be about 0.",
            KLWarning,
            stacklevel=2,
        )
        return
    except (StopIteration, TypeError, ValueError) as error:
        raise reference.failed("it does not name the tokens of a text by their ids") from error
    for text, mine, other in zip(texts, ours, theirs, strict=True):
        if list(mine[1:]) != other:
            raise ModelError(
                "the reference's server has another tokenizer than the policy",
                got=f"{text[:80]!r}: {_start(other)} at the server, {_start(list(mine[1:]))} here (after the first)",
                why="log-probabilities of the same token ids would speak of different tokens",
                fix="serve a model of the same family with the policy's tokenizer (vLLM: --tokenizer)",
            )


def _start(ids: list[int]) -> str:
    return f"{len(ids)} tokens {ids[:12]}"
