"""Asks a sampling client for the reference's log-probabilities: in order, with limits, retries and timeouts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, POSITIVE, check_number, describe
from klamp.errors import DataError, ModelError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.padded import token_ids


async def compute_reference_logprobs(
    ref_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    *,
    concurrency: int = 64,
    retries: int = 5,
    backoff: float = 0.5,
    timeout: float = 300.0,
) -> list[list[float]]:
    """Log-probabilities of the responses under the reference, in nats, in the order of the responses.

    One request per response, `concurrency` at a time. Lost connections, timeouts and the statuses 408, 409, 429 and
    5xx are tried again, `backoff` seconds later and twice as long each time (at most 30 s, with a random share off);
    anything else ends it at once. Where the SDK can score a suffix only (0.34 and later) the prompt is not scored.

    Args:
        ref_client: a `SamplingClient` of the base model (or of a snapshot), or the SDK's future of one, which is
            awaited first; a client that has only `compute_logprobs_async` will do.
        prompt_tokens: one list of ids per response, none of them empty.
        response_tokens: the responses; an empty one gives an empty list and costs no request.
        concurrency: requests in flight at a time.
        retries: attempts after the first one, per response.
        backoff: seconds before the second attempt.
        timeout: seconds for one attempt. Nothing takes longer than (retries + 1) (timeout + 30 s) per response.

    Returns:
        One list per response, as long as the response.

    Raises:
        ModelError: the service refuses, or does not answer after all attempts; the sequence is named.
        NonFiniteError: None, NaN or an infinity inside a response.
        ShapeError: an answer of another length than the tokens (n values, or n - 1 without the first token's None).
        DataError, ConfigError: arguments that cannot be used.
        UnsupportedVersion: the SDK is missing or outside the range.

    Source: the Tinker guide (docs/sources.md)
    """
    load_tinker()
    check_number("concurrency", concurrency, AT_LEAST_1, whole=True)
    check_number("retries", retries, AT_LEAST_0, whole=True)
    check_number("backoff", backoff, AT_LEAST_0)
    check_number("timeout", timeout, POSITIVE)
    prompts = _sequences("prompt_tokens", prompt_tokens)
    responses = _sequences("response_tokens", response_tokens)
    _check_sequences(prompts, responses)
    asker = Asker(await resolve(ref_client), retries=retries, backoff=backoff, timeout=timeout)
    free = asyncio.Semaphore(concurrency)

    async def one(i: int, prompt: list[int], response: list[int]) -> list[float]:
        if len(response) == 0:
            return []
        async with free:
            answer = await asker.ask(i, prompt + response, len(response))
        return response_part(i, answer, len(prompt), len(response))

    pairs = zip(prompts, responses, strict=True)
    tasks = [asyncio.ensure_future(one(i, *pair)) for i, pair in enumerate(pairs)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def response_part(i: int, answer: Sequence[float | None] | None, prompt: int, response: int) -> list[float]:
    """The response's log-probabilities out of what `compute_logprobs` answered for prompt + response.

    Args:
        i: which sequence, for the errors.
        answer: one value per token, the first None; or, from some servers, without that first one.
        prompt: tokens of the prompt.
        response: tokens of the response.

    Raises:
        ShapeError, NonFiniteError: see `compute_reference_logprobs`.
    """
    length = None if answer is None else len(answer)
    if answer is None or length not in (prompt + response, prompt + response - 1):
        raise ShapeError(
            f"sequence {i}: the reference answered with another number of log-probabilities than there are tokens",
            got=f"{length} values for {prompt} + {response} tokens",
            why="each value belongs to one token",
            fix="check that the client scores these tokens and does not cut the sequence at its context length",
        )
    values = list(answer[length - response :])
    bad = [j for j, value in enumerate(values) if value is None or not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"sequence {i}: the reference has no log-probability for a token of the response",
            got=f"{values[bad[0]]} at token {bad[0]} of the response, {len(bad)} of {response} tokens",
            why="a KL without it would be NaN, or leave the token out without a word",
            fix="check that the reference's vocabulary has the token",
        )
    return [float(value) for value in values if value is not None]


def _sequences(name: str, sequences: object) -> list[list[int]]:
    """Lists of token ids, one per sequence."""
    if not isinstance(sequences, Iterable):
        raise DataError(
            f"{name} must hold one list of token ids per response",
            got=describe(sequences),
            why="each response is scored behind its own prompt",
            fix=f"pass {name} as a list of lists of ints",
        )
    return [token_ids(f"{name}[{i}]", tokens) for i, tokens in enumerate(sequences)]


def _check_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
    if len(prompts) != len(responses):
        raise DataError(
            "prompts and responses differ in number",
            got=f"{len(prompts)} prompts, {len(responses)} responses",
            why="each response is scored behind its own prompt",
            fix="repeat each prompt for every response of its group",
        )
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(
                f"sequence {i}: the prompt is empty",
                got="no tokens",
                why="the first token of a sequence has no log-probability",
                fix="start the prompt with the beginning-of-sequence token",
            )


LONGEST_WAIT = 30.0
"""The longest wait between two attempts, in seconds."""


@dataclass
class Asker:
    """Asks a client for log-probabilities, and tries again after errors that may pass."""

    client: Any
    retries: int
    backoff: float
    timeout: float
    suffix: bool = field(init=False)
    """Whether the client scores a suffix only; taken back where the server turns out not to."""
    # A generator of its own: the waits must not move anybody's seeds.
    jitter: random.Random = field(default_factory=random.Random, init=False)

    def __post_init__(self) -> None:
        name = "compute_logprobs" if hasattr(self.client, "compute_logprobs") else "compute_logprobs_async"
        self.method = getattr(self.client, name)
        self.suffix = "prompt_logprobs_last_n" in inspect.signature(self.method).parameters

    async def ask(self, i: int, tokens: list[int], response: int) -> Sequence[float | None] | None:
        """The client's answer for one sequence, after as many attempts as are needed."""
        prompt = load_tinker().ModelInput.from_ints(tokens)
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._once(prompt, response)
            except Exception as error:
                if not is_transient(error):
                    raise _failed(i, "refuses to score the sequence", error) from error
                if attempt == self.retries:
                    raise _failed(i, f"did not answer in {attempt + 1} attempts", error) from error
                wait = min(self.backoff * 2**attempt, LONGEST_WAIT)
                await asyncio.sleep(wait * self.jitter.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    async def _once(self, prompt: Any, response: int) -> Sequence[float | None] | None:
        if not self.suffix:
            return await resolve(self.method(prompt))
        try:
            return await resolve(self.method(prompt, prompt_logprobs_last_n=response))
        except RuntimeError as error:
            # The SDK's own finding that the server scored the whole prompt all the same.
            if "prompt_logprobs_last_n" not in str(error):
                raise
            self.suffix = False
            return await resolve(self.method(prompt))


async def resolve(answer: Any) -> Any:
    """The value out of what the SDK (or a test's fake) returns: an awaitable, a future, or the value itself."""
    if hasattr(answer, "__await__"):  # first: newer SDKs hand back futures that are both, and warn of the older use
        return await answer
    return await asyncio.wrap_future(answer) if isinstance(answer, concurrent.futures.Future) else answer


def is_transient(error: Any) -> bool:
    """Whether an error may pass: lost connections, timeouts, HTTP 408, 409, 429, 5xx, faults of the service."""
    tinker: Any = load_tinker()
    if isinstance(error, TimeoutError | ConnectionError | tinker.APIConnectionError):
        return True
    if isinstance(error, tinker.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, tinker.RequestFailedError) and str(error.category).lower() != "user"


def _failed(i: int, what: str, error: Exception) -> ModelError:
    return ModelError(
        f"sequence {i}: the reference {what}",
        got=f"{type(error).__name__}: {error}",
        why="training without this KL would be another loss",
        fix="check the service, the base model's name and the key; then continue from the last checkpoint",
    )
