"""A reference on a vLLM server, or on any that speaks OpenAI's protocol and returns log-probabilities of prompts.

A sequence is sent to `/v1/completions` as a prompt of token ids with `prompt_logprobs`; the numbers of its tokens, and
of the k likeliest at each place where a head is asked for, come back with their ids. One token is generated and thrown
away. The numbers come from the plain model: no temperature, penalty or truncation of a request or of the server's
defaults changes them. `connect` checks such a server before any work.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import chain
from typing import Any, Literal, TypeAlias, cast
from urllib.error import HTTPError

import torch
from transformers import PreTrainedTokenizerBase

from klamp.core.types import FORBIDDEN
from klamp.errors import ConfigError, KLWarning, ModelError, unknown_name
from klamp.scoring.completions import Completions, kept_ids
from klamp.scoring.model_parts import Told
from klamp.scoring.scorer import Scores

KEY = "KLAMP_REFERENCE_KEY"
"""The environment variable whose value is sent as a bearer token; it is in no message and no file of klamp's."""
TRIES = 4
TIMEOUT_SECONDS = 120.0
FAILURES = (OSError, HTTPException, ValueError, RecursionError)
FINAL = {*range(400, 500), 501} - {429}
"""The statuses of a refusal, which is not asked again."""
AT_ONCE = 32
"""Sequences in a request: the server batches them, and the answer stays within megabytes."""
CONCURRENT = 4
PROBES = 8
"""Prompts whose tokens are compared."""
ABOVE_ZERO = 1e-3
"""What rounding may add to a log-probability of 0, and to probabilities that sum to 1."""
LOWEST = torch.finfo(torch.float32).min

Entry = dict[str, dict[str, Any]] | None
"""A server's answer at one position: a token's id -> its log-probability and rank; None at the first position."""
Who: TypeAlias = Literal["reference", "teacher"]
Place = list[tuple[int, float]]
"""Of one position the ids and log-probabilities of the likeliest tokens, by rank, and of the one that is there."""


class VLLMReference:
    """A reference (or teacher) that a vLLM server scores: log-probabilities of tokens and of its likeliest, no logits.

    Equation: log softmax(logits) at each token of the completion; temperature 1 only.

    Args:
        url: where the server listens, without `/v1`.
        name: the model's name at the server.
        top_k: how many of its likeliest tokens to ask for at each position; None: no head.
        vocabulary: how many tokens the policy's tokenizer has; None: unknown.
    """

    def __init__(self, url: str, name: str, top_k: int | None = None, vocabulary: int | None = None) -> None:
        self.url, self.name, self.head, self.top_k = url, name, top_k is not None, top_k or 0
        self.vocabulary = vocabulary or 2**24

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """Ask the server for the log-probabilities of the completions, and for its likeliest tokens."""
        prompts = kept_ids(completions.prompt_ids, completions.prompt_mask)
        rows = self.score_tokens(prompts, kept_ids(completions.ids, completions.mask), temperature=temperature)
        values = torch.zeros(*completions.ids.shape, self.top_k + 1, 2)
        places = torch.tensor([place for row in rows for place in row])
        values[completions.mask.cpu()] = places.view(-1, *values.shape[2:])
        values = values.to(completions.ids.device)
        return Scores(logprobs=values[:, :, -1, 1], predictions=Told(values=values, head=None) if self.head else None)

    def score_tokens(
        self, prompts: list[list[int]], completions: list[list[int]], *, temperature: float
    ) -> list[list[Place]]:
        """The server's numbers for every token of some completions, each behind the ids of its prompt."""
        if temperature != 1:
            raise ConfigError(
                "a vLLM server scores at temperature 1 only",
                got=f"temperature={temperature:g}, a server at {self.url}",
                why="klamp compares policy and anchor at the sampling temperature, and vLLM returns log-probabilities "
                "of prompts before any temperature: their difference is not 0 even between equal models",
                fix="set temperature=1, or keep the model on this machine (reference='frozen', teacher_model)",
            )
        sequences = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        parts = [sequences[start : start + AT_ONCE] for start in range(0, len(sequences), AT_ONCE)]
        with ThreadPoolExecutor(CONCURRENT) as pool:
            answers = chain.from_iterable(pool.map(partial(self.entries, top_k=self.top_k), parts))
            rows = [self._places(ids, entries) for ids, entries in zip(sequences, answers, strict=True)]
        return [row[len(row) - len(tokens) :] for row, tokens in zip(rows, completions, strict=True)]

    def entries(self, prompts: Sequence[list[int]] | Sequence[str], top_k: int = 0) -> list[list[Entry]]:
        """The server's answers at every position of some prompts, passed as ids or as texts."""
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, "add_special_tokens": False}
        answer = ask(f"{self.url}/v1/completions", {"model": self.name, "prompt": list(prompts), **settings})
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            entries = [choice.get("prompt_logprobs") for choice in choices]
        except (KeyError, TypeError, AttributeError) as error:
            raise failed(self.url, "it does not answer as /v1/completions does") from error
        if len(entries) != len(prompts) or not all(isinstance(row, list) and row for row in entries):
            why = "it returned no log-probabilities of the prompts: it has to know prompt_logprobs, as vLLM does"
            raise failed(self.url, why)
        return entries

    def _places(self, ids: list[int], entries: list[Entry]) -> list[Place]:
        try:
            places = [self._place(token, entry or {}) for token, entry in zip(ids[1:], entries[1:], strict=True)]
            numbers = [number for place in places for token, number in place if token >= 0]
            others = [number for number in numbers if isinstance(number, bool) or not LOWEST <= number <= ABOVE_ZERO]
        except (KeyError, TypeError, ValueError) as error:
            raise failed(self.url, "it returned numbers of other tokens than those that it was sent") from error
        if others:
            raise failed(
                self.url,
                f"it returned numbers that are no log-probabilities ({str(others[0])[:20]} is one of them): vLLM does "
                "so with --logprobs-mode raw_logits or processed_logits; start it with raw_logprobs, its default",
            )
        for token, place in zip(ids[1:], places, strict=True):
            chances = {name: math.exp(number) for name, number in place if name >= 0}
            beyond = [n for n, p in chances.items() if n != token and n >= self.vocabulary + 4096 * (p <= ABOVE_ZERO)]
            if beyond:  # a model is padded by fewer ids than 4096, and none of these is likely
                raise failed(self.url, f"it returned token {beyond[0]}, and the tokenizer has {self.vocabulary} tokens")
            if (total := sum(chances.values())) > 1 + ABOVE_ZERO:
                raise failed(self.url, f"the probabilities of its likeliest tokens sum to {total:.4g}")
        return [[(token, -math.inf if number <= FORBIDDEN else number) for token, number in place] for place in places]

    def _place(self, token: int, entry: dict[str, dict[str, Any]]) -> Place:
        """The k likeliest by rank; the server also returns the token itself, which may rank lower."""
        best = sorted((row["rank"], int(name), row["logprob"]) for name, row in entry.items()) if self.top_k else []
        head = [(name, number) for rank, name, number in best if rank <= self.top_k]
        if len(head) < min(self.top_k, len(entry)) or (best and {str(abs(name)) for _, name, _ in best} != {*entry}):
            raise KeyError("fewer of the likeliest than were asked for, or under other names than ids")
        return [*head[: self.top_k], *[(-1, 0.0)] * (self.top_k - len(head)), (token, entry[str(token)]["logprob"])]

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        return f"{self.name} on the server at {self.url}"


def failed(url: str, why: str) -> ModelError:
    """The error for a server that does not answer as it should."""
    return ModelError(
        "the remote model does not answer as it should",
        got=url,
        why=why,
        fix="check that the server runs and serves the reference of this tokenizer; a run that had begun goes on "
        "with --resume",
    )


def connect(
    url: str,
    name: str | None,
    *,
    top_k: int | None,
    temperature: float,
    longest: tuple[int, int],
    prompts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    who: Who,
) -> VLLMReference:
    """The server at an address, with `/v1` or without, found to fit a run; without a name its only model is meant.

    `longest`: the tokens of the longest prompt and of the longest completion.

    Raises:
        ModelError: the server does not answer, has no such model, returns no log-probabilities or fewer of the
            likeliest tokens (--max-logprobs), takes only shorter sequences, or has another tokenizer.
        ConfigError: a name or a temperature that the server cannot honour.
    """
    url = url.rstrip("/").removesuffix("/v1")
    reference = VLLMReference(url, _name(url, name, who), top_k, len(tokenizer))
    # A server that holds only shorter sequences than the run may have refuses this one, in its own words.
    prompt, completion = ([cast(int, tokenizer.eos_token_id)] * tokens for tokens in longest)
    reference.score_tokens([prompt], [completion], temperature=temperature)
    _check_tokenizer(reference, tokenizer, prompts[:PROBES])
    return reference


def _name(url: str, asked: str | None, who: Who) -> str:
    answer = ask(f"{url}/v1/models")
    try:
        names = sorted(str(card["id"]) for card in answer["data"])
    except (LookupError, TypeError, AttributeError) as error:
        raise failed(url, "it lists no models at /v1/models, as vLLM does") from error
    if asked is not None and asked not in names:
        raise unknown_name(f"model of the {who}'s server", asked, [*map(_plain, names)])
    if asked is None and len(names) != 1:
        raise ConfigError(
            f"the {who}'s server does not serve one model",
            got=f"{who}_url={url!r}",
            why=f"it names {', '.join(map(_plain, names)) or 'none'}",
            fix=f"set {who}_name to one of them, or start it with a model",
        )
    return asked or names[0]


def _check_tokenizer(reference: VLLMReference, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> None:
    texts = [prompt + str(tokenizer.eos_token) for prompt in prompts]
    ours = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    try:
        answers = reference.entries(texts)
    except ModelError as error:
        warnings.warn(
            f"The server at {reference.url} scores tokens and takes no texts ({error.why}): whether its tokenizer "
            "is the policy's is not known.",
            KLWarning,
            stacklevel=2,
        )
        return
    try:
        theirs = [[int(next(iter(entry or {}))) for entry in entries[1:]] for entries in answers]
    except (StopIteration, TypeError, ValueError) as error:
        raise failed(reference.url, "it does not name the tokens of a text by their ids") from error
    for text, mine, other in zip(texts, ours, theirs, strict=True):
        if list(mine[1:]) != other:
            raise ModelError(
                "the server has another tokenizer than the policy",
                got=f"{text[:80]!r}: {other[:12]} at the server, {list(mine[1:13])} here (after the first)",
                why="equal token ids would mean different tokens",
                fix="serve a model of the same family with the policy's tokenizer (vLLM: --tokenizer)",
            )


def ask(url: str, content: dict[str, Any] | None = None) -> Any:
    """Ask a server, by POST if there is content, as JSON, else by GET; what it refuses (`FINAL`) is not asked again."""
    data = None if content is None else json.dumps(content).encode()
    numbers = len(data or b"") * ((content or {}).get("prompt_logprobs", 0) + 2)  # more than there will be
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if authorization := _bearer():
        request.add_unredirected_header("Authorization", authorization)
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return json.loads(_body(response, url, 2**20 + 200 * numbers))
        except ModelError:
            raise
        except FAILURES as error:
            if attempt == TRIES - 1 or (isinstance(error, HTTPError) and error.code in FINAL):
                raise failed(url, _reason(error)) from error
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("the last try gives an answer or raises")


def _body(response: Any, url: str, most: int) -> bytes:
    """The body of an answer: at most `most` bytes within the time limit; a server may write without end."""
    body, end = bytearray(), time.monotonic() + TIMEOUT_SECONDS
    while part := response.read1(2**16):
        body += part
        if len(body) > most or time.monotonic() > end:
            raise failed(url, f"its answer does not end: {len(body)} bytes within {TIMEOUT_SECONDS:g} seconds")
    return bytes(body)


def _bearer() -> str:
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY} is no key",
            why="a key that is sent over HTTP is printable ASCII on one line",
            fix="copy the key anew",
        )
    return key and f"Bearer {key}"


def _reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HTTPError):
        with suppress(*FAILURES):
            text += f" {error.read1(2**16).decode(errors='replace')}"  # pyright: ignore[reportAttributeAccessIssue]
        if error.code in (401, 403):
            text = f"the key is what the environment variable {KEY} holds; {text}"
    return _plain(text)


def _plain(text: str) -> str:
    """What a server wrote, on one line, without the key that it may quote."""
    if key := _bearer().removeprefix("Bearer "):
        text = text.replace(key, "[the key]").replace(json.dumps(key)[1:-1], "[the key]")
    plain = "".join(sign if sign.isprintable() else " " for sign in text)  # a server may not write to the terminal
    return " ".join(plain.split())[:500]
